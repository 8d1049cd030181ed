"""The files of a run: where they lie, how they are written, checkpoints and resume.

paths: the run's folder. locks: its lock. results: results.json and rounds.jsonl. status: how a run goes or ended, read
from these. writers: config.yaml, model.safetensors, and how every file is written. checkpoints, resume: checkpoint/.
tensorboard: tensorboard/. nodes.json is written by server_app/clients/nodes.py, the account of privacy by
server_app/privacy/account.py, pictures and report.html by server_app/report/.
"""

"""The files of a run: where they lie, how they are written, checkpoints and resume.

paths: the run's folder and its lock. results: results.json and rounds.jsonl. writers: config.yaml, model.safetensors,
and how every file is written. checkpoints, resume: checkpoint/. tensorboard: tensorboard/. nodes.json is
written by server_app/clients/nodes.py, the account of privacy by server_app/privacy/account.py, pictures and
report.html by server_app/report/.
"""

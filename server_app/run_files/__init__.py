"""The files of a run: where they lie, how they are written, checkpoints and resume.

paths: the run's folder and its lock. results: results.json and rounds.jsonl. writers: config.yaml, model.safetensors,
and how every file is written. checkpoints, resume: checkpoint/. tensorboard: tensorboard/. Pictures and report.html
are written by server_app/report/.
"""

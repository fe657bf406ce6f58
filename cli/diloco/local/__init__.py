"""``diloco run``: one job on this machine, from the first start to report.json.

``runner`` starts and restarts processes, ``watch`` reads the syncer's status, ``screen`` shows it, ``outcome``
writes how it ended. May import ``processes``; never ``cluster``.
"""

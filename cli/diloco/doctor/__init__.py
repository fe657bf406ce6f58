"""``diloco doctor``: whether this machine, a cluster and a job are fit, before anything is started."""

"""What a program of your own uses without a session with a syncer: the merged model of a job (``merged``), and the
loop without its job (``learner``)."""

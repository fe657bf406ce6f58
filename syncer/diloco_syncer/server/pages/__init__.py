"""Documents that are read over HTTP: status and report, metrics, the job, and the merged model.

Pages only read the parts that they are given; nothing here changes the job.
"""

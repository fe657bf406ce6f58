"""What callers reach: the services of the sync port and of the control port, TLS, and HTTP pages.

A handler checks who calls, turns the call into events or reads, and answers. It may import ``runtime`` and what
is below it. Decisions about the job are never made here.
"""

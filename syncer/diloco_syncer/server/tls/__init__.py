"""Mutual TLS of the sync port: listener, connections, limits for each certificate, authorization of calls.

It may import the protocol package only. Whose connection it is, is decided here; what a learner may do with it
in the job never is.
"""

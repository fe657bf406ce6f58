"""Small things that every program needs: files written whole, HTTP pages, logs, quantities, meters.

Imports the standard library only, and nothing of the other sub-packages; nothing here knows what a job is."""

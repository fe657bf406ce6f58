"""Links as people have them, and learners without a model that try them: what bench/links.py runs."""

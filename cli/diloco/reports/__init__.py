"""Reports for people: one document, as one HTML page that needs nothing else.

``document`` says what a report is made of; every measurement's ``--json`` prints one. ``html`` and ``plots``
render it, ``run_report`` makes one of a run's directory and alone touches files. What is measured, and how,
is the business of who makes the document.
"""

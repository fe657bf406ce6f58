"""Training programs of other libraries as learners: ``transformers.Trainer`` and Lightning.

``transformers`` and ``lightning`` have a module each, which imports that library; ``framework_loop`` is what they
share. accelerate needs none: ``Learner.from_environment`` takes its wrappers. docs/integrations.md has whole scripts.
"""

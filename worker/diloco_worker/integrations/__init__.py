"""Training programs and launchers of other libraries for learners: ``transformers.Trainer``, Lightning, torchrun.

``transformers`` and ``lightning`` have a module each, which imports that library; ``framework_loop`` is what they
share. accelerate needs none: ``Learner.from_environment`` takes its wrappers. ``torchrun`` starts the ranks of a
learner in its pod. docs/integrations.md has whole scripts.
"""

"""What a rank of a learner does that does not lead, and how ranks begin."""

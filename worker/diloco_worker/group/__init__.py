"""A learner of several processes (*ranks*, as torchrun starts them): what they say to each other, and how values go
between them. Rank 0 leads: it alone has a session with the syncer and decides. The others follow its commands between
two steps. A learner of one process is a group of one (``ranks.Ranks``)."""

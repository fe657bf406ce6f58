"""Trials: many small training runs, each a cell of the tables of bench/quality.py and bench/ablations.py.

A trial is one training run from scratch that is told by its values alone: which model and size, how many merges of each
fragment, which seed, how many learners, what of the job is not its default. Its result (the held-out loss, what became
of the tokens) follows from them and from the code, so that it is kept in a folder under a digest of both, and a run
that is interrupted goes on where it was. Losses of the same seed are compared in pairs: data-parallel training of the
same model on the same sequences is a trial, too, with no learners.

A trial takes one core. Its learners live in one process in virtual time (``lab.world``): their steps, the
adoption rule, the merge, the outer optimizer and the encodings are the product's own code, and clock, links and deaths
are simulated. All learners' weights lie in one array, so that steps which end together are computed together.

``cells``    a trial, its digest and its cost; runs those that are missing, keeps what came of them
``tasks``    models, data and evaluation, as jobs that the product reads
``models``   their losses for many learners' weights at once
``fleet``    learners of one job: weights, gradients, steps; and the data-parallel reference
``inner``    inner optimizers: AdamW, Muon
``outers``   outer optimizers that the job file cannot name
``versions`` the syncer's versions, where such a one needs more than the product's
``ddp``      the reference by torch's DistributedDataParallel, two processes
``tables``   means, intervals, rows
``reports``  rows as Markdown and as a page with plots
"""

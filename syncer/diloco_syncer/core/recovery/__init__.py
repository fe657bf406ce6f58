"""Recovery of versions that the store lost. It is what makes a lost or emptied volume survivable.

**What can be lost.** Every merge is a record in the store, and every change of membership a state document.
A disk may lose the newest of them, be restored from an older copy, or come back empty. Learners hold the
bytes of the newest version of every fragment that they downloaded, so the job's parameters still exist.

**What happens.** At Join every learner names the version that it holds of each fragment, and the epoch under
which it was told of it. Between a restart of the syncer and the first merge after it:

1. ``lost_versions`` sees that a learner holds more than the store (or the tape says so). From then on no push
   is accepted, training waits, and that learner is not told of the store's older version, for it would replace
   what is wanted of it.
2. When every learner is back or given up, the holder of the newest version of each fragment is asked for it.
   It uploads the bytes and the *receipt* that came with them: how many tokens of every slot are in it.
3. The version becomes a record of its own kind, and the syncer begins again from its store. ``receipts`` sets
   the ledger there, so that trained = merged + pending + dropped still holds to the token.
4. If no learner has anything, the job goes on from what the store has. ``lineage`` remembers it: versions above
   are another lineage's from now on, and never come back.

**Example.** The store has version 5 of fragment 0, made in epoch 2; it lost versions 6 to 8. The syncer starts
as epoch 3. Learner a joins and holds (epoch 2, version 8), learner b (epoch 2, version 7). a is asked, and its
bytes become the record of version 8, which *follows* version 5. After the restart as epoch 4, a is told of
version 8: same bytes, so only the label of its base changes. b moves its own work from version 7 onto 8.

**An empty store.** A learner that joins with versions above 0 shows that the store was emptied. The syncer
claims an epoch above all that the learner knows, and the learner uploads layout, frozen parameters and its
bases as version 0; the records say that they stand in for later versions (epoch 0). Then the same steps
follow for every fragment, with two differences: a learner's tenure goes on in the slot that it names, though
the store has never heard of it; and the job never goes on from a stand-in, but waits for a learner that holds
the fragment. No learner can know the outer optimizer's momentum, the order of the data, the job's elapsed time
and scores, and tokens dropped in tenures that are over: these begin anew, and an event says so.
Where only learners that stand by are ahead, one of them uploads and is asked, and goes on standing by.

``lost_versions`` decides, ``receipts`` counts, ``books/lineage`` remembers. The bytes come in through
``runtime/version_recovery.py``; ``service.py`` applies the records at the next start.

The rest of the core asks at three points only: admission once for each Join (``joins``), and ``phases`` before
training begins and before the last merges (``begin_training``, ``begin_last_merges``). ``core`` connects them.
``nonsense`` repairs a restored state that holds impossible numbers.
Nothing here touches a socket, a clock or a file.
"""

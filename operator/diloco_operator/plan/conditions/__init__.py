"""The conditions of a DiLoCoJob: which there are, and where each is decided.

On every job: Ready, Suspended, Complete, Failed, Degraded, NameConflict, and kstatus' Reconciling and Stalled
(``decide.py``).
In the hub: SyncerReady, Durable, QuorumMet, RegionLost (``decide.py``), LinksTooSlow and RoundOverdue
(``hub_conditions.py``).
In a cluster without the syncer: HubReachable, SettingsDiffer (``region_conditions.py``).
On both sides: SpecDrift. In the hub it is about the learners that the syncer refused for it
(``hub_conditions.py``), elsewhere about the learners here (``region_conditions.py``).

What cannot be known at the moment is Unknown, or stays as it was. A job whose spec is invalid keeps its
conditions, and says why in Ready.

A new condition: decide it in one of these three files with ``ConditionSet.set``, in every turn; give it its place in
``condition_set.ORDER`` and its line above. If it tells of a fault when it is True, name it in
``FAULT_CONDITIONS`` (diloco_protocol/vocabulary.py), by which the command line chooses colours, and in
``FAULT_OVER`` (``plan/transitions.py``), so that an Event is sent when it comes and when it goes. One that is timed
needs a ``Fact`` (``model.py``); one whose False is nothing to tell, a place in ``_NEUTRAL`` (the command line's
``cluster/render.py``), or it is shown in red while it is False: no test notices. Where the job does not train, those of
``hub_conditions.py`` become False. Describe it in docs/decisions/024 and in docs/operator.md; one of the hub or of the
other clusters alone also in docs/regions.md.
Tests complain of one of ``ORDER`` that docs/operator.md does not have, of a fault without ``FAULT_OVER``, and of an
unexpected condition in a cluster without the syncer. ``plan/job_status.py`` and the CRD need nothing.
"""

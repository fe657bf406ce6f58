#!/usr/bin/env bash
# Run a command with the lowest priority that this machine has, in a session of its own.
#
#   tools/in_background.sh COMMAND...
#
# Linux groups processes by session for its scheduler where kernel.sched_autogroup_enabled is 1: every group has the
# same weight, and nice and SCHED_IDLE count within a group only. So the group gets a nice value too.
set -euo pipefail
if [ "${1:-}" != --in-session ]; then exec setsid --wait "$0" --in-session "$@"; fi
shift
echo 19 2>/dev/null >/proc/self/autogroup || true # there is none where autogroups are off
renice -n 19 -p $$ >/dev/null
if chrt --idle -p 0 $$ 2>/dev/null; then :; fi
if command -v ionice >/dev/null; then ionice -c 3 -p $$ 2>/dev/null || true; fi
exec "$@"

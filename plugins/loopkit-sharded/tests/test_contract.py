"""The plugin keeps the contract of plugins, alone; in two processes it is test_checkpoint.py that asks."""

import tempfile

from loopkit_testing import plugin_contract

from loopkit_sharded import ShardedCheckpoint

FORKED = {"two_processes": "its directory has to be that of all of them: see test_checkpoint.py"}

test_contract = plugin_contract(lambda: ShardedCheckpoint(tempfile.mkdtemp()), name="sharded_checkpoint", skip=FORKED)

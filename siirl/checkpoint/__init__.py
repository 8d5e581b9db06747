"""Checkpoints: on disk, in memory, and as models.

Checkpoints in memory are those on disk, in a folder of each machine (`siirl/checkpoint/machines.py`). A
machine is the ranks that the launcher has started together, not a host name. Ranks write their files into
the folder of their machine, and send them to the rank in the same place of the next one, over the group
that saves in the background have anyway: there is no server, no port and no token. The manifest of all
files lies on every machine; an older checkpoint goes only when the new one has its place everywhere. Who
goes on asks every machine what it holds of what manifest, takes the newest that is whole in all of them
together, and fetches the files that its ranks will read: what the index says of their tensors. So machines
may be lost, swapped, more or fewer. What differs between launchers is who holds the folder: the local
launcher, an actor of Ray, or torchrun's agent, which runs no code of ours, so that the
folder is named after it (`siirl/launch/memory_checkpoints.py`).

Checkpoints are written aside, checked by a manifest, and become current by one atomic pointer; a damaged
one is passed over for the one before it, with a message.
"""

"""The training service: clients of Tinker's API train adapters here, by their own loops (docs/serve.md).

A node of the DAG (op `service`) is asked from outside. `service_endpoint.py` is the HTTP server: it turns
requests into the commands of `commands.py`, and keeps sessions, names and who may do what; the first rank
forks the process in which it runs (`server_process.py`). `rest_answers.py` answers what is asked of
`saved_weights.py` alone, and `tenant_keys.py` reads who has which key. `desk.py` is between the server and
the worker: commands in their order, answers until they are read. `wire.py` knows the bytes of requests and
answers. `tenants.py` has what the commands are about: an adapter with an optimizer for
each training client, all on one base, snapshots of them for samplers, and their files.
`snapshot_sampling.py` samples from a snapshot, or the base. For a server that begins again
`accepted_requests.py` keeps what is to be answered, `request_journal.py` what was, `sessions.py` who asks,
and `suspects.py` amid which requests servers have ended. `http_edge.py` makes errors answers. The loop that
takes one command after the other is the node's op (siirl/nodes/asked.py), as a step of the plan.
"""

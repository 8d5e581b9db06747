"""Agents: conversations of policies, environments, tools and programs.

Rollouts and environments that depend on each other directly are one interaction
(`siirl/compiler/interactions/find.py`; one node of it: `siirl/compiler/interactions/stages.py`). Its entry
is its first rollout.

- **One Run plays all.** The Run of the entry plays all episodes of its rank, an asyncio task each, with no
  barrier (`siirl/agents/runner.py`). Rows of the other agents wait there; the Runs of these agents, right
  after, give them out in the same ranks and shards. So loops and routes are no instructions, and the plan
  stays a list.
- **Turns at once.** What an episode does is a list of nodes that are left: one by one, those that no edge
  orders together (`siirl/agents/turns_at_once.py`). Loops and routes replace it.
- **Weights** of all policies of the interaction are synced before that Run.
- **A context only grows** (`siirl/agents/contexts.py`): what the model produced is never tokenised again.
  Where the context cannot grow, because it was rewritten or is full, a new row begins; what comes back to
  an earlier row goes on there. Row ids leave room for the most rows that an episode can have.
- **Mini-batches** of agents that talk are counted in prompts, not rows: the number of optimizer steps does
  not depend on how much was said.
- **Seeds** of turns are functions of (run seed, step, episode, agent, turn).
- **A program may play** (`actor_rollout_ref.serve`, `siirl/agents/outside/`) in the place of the stages:
  `Game.play_outside` has an episode played by a command or a function, and everything else is as ever. Each
  rank that plays has an `Endpoint`, an HTTP server in a thread, whose requests become turns on the
  episode's own event loop. A `Session` maps messages to the row that holds most of their beginning; what is
  read before a turn becomes part of the row with the turn (`TurnPrompt`), so a request that is given up
  leaves no trace, and several may be open at once. A command runs under the keeper of reward workers
  (`siirl/sandbox/keeper.py`), which ends all that it has started.

Episodes are played by the first rank of each shard of the entry's rollout: the drivers. The compiler
(siirl/compiler/serving.py) gives each driver the engines that answer it, by policy
(`InteractionPlan.streams`); a driver whose own rank has the engine needs no entry. A rank that holds an
engine and plays nothing has a `Serve` instead of that Run:

    weights  0-1    agent_0.actor -> agent_0.rollout, if newer
    weights  2      agent_1.actor -> agent_1.rollout, if newer
    serve    2      agent_1.rollout to solver
    run      0-1    solver on agent_0.prompts/0 -> agent_0.samples/0

- Drivers and engines are laid out on one line in equal runs, so there are fewer streams than drivers and
  engines together. What overlaps is a share of the driver's episodes (`StreamPlan.shares`), and all engines
  have the same load.
- An engine that several ranks ask has one stream, which a thread of its rank serves to all, its own rank
  included (`siirl/nodes/streams.py`). Addresses and tokens are gathered once, when the workers start.
- A Serve ends when all its drivers have closed their streams; where episodes go on while others train, when
  they have the episodes of the step, and the thread goes on. A driver that fails says why before it goes,
  and the server passes that on to the other drivers, also to those that ask later. They raise a
  `PeerError`, which the launcher never takes for the cause.
- The other ranks of a shard have a Serve that nobody asks: their part of the engine goes to sleep with the
  rest of the shard.
"""

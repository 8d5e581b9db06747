"""What vLLM's scheduler gives of each step, kept until a response ends: a stand-in gives random steps."""

import random
from types import SimpleNamespace

import numpy as np
from later import Later, needed

needed("vllm")
steps = Later("siirl.engines.rollout.vllm.native_steps")
engine_types, outputs_types = Later("vllm.v1.engine"), Later("vllm.v1.outputs")


class Scheduler:
    """Gives the outputs that it is told to, and remembers what it was given of log-probs."""

    def __init__(self):
        self.given, self.outputs = [], []

    def update_from_output(self, scheduled, sampled):
        self.given.append(sampled.logprobs)
        return {0: engine_types.EngineCoreOutputs(outputs=self.outputs)}


class Engine(SimpleNamespace):
    def __init__(self, log_stats=False):
        super().__init__(
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=Scheduler())),
            log_stats=log_stats,
        )
        self.scheduler = self.engine_core.engine_core.scheduler

    def step(self, outputs, log_probs):
        """What reaches vLLM's output processor of a step. log_probs: of all requests' tokens, in order."""
        self.scheduler.outputs = outputs
        columns = np.stack([log_probs, np.full(len(log_probs), 9.0)], 1)
        sampled = SimpleNamespace(
            logprobs=outputs_types.LogprobsLists(columns, columns, columns[:, 0], None),
            req_id_to_index={output.request_id: place for place, output in enumerate(outputs)},
        )
        (found,) = self.scheduler.update_from_output(None, sampled).values()
        return found.outputs


def test_a_response_ends_with_all_of_its_tokens_and_log_probs():
    rng, engine = random.Random(0), Engine()
    kept, wanted, said = steps.KeptTokens(engine), {}, {}
    lengths = {f"s_{number}-{rng.randrange(1 << 30):x}": rng.randrange(1, 30) for number in range(9)}
    while lengths:
        outputs, column = [], []
        for request in rng.sample([*lengths], rng.randrange(1, len(lengths) + 1)):
            tokens, log_probs = [rng.randrange(99)], [-rng.random()]
            of = wanted.setdefault(request, ([], []))
            of[0].extend(tokens)
            of[1].extend(log_probs)
            lengths[request] -= 1
            ends = engine_types.FinishReason.LENGTH if not lengths[request] else None
            outputs.append(
                engine_types.EngineCoreOutput(
                    request, tokens, finish_reason=ends, num_nans_in_logits=rng.random() < 0.1
                )
            )
            column += log_probs
        for output in engine.step(outputs, column):
            said.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                del lengths[output.request_id]
                name = steps.own_name(output.request_id)
                assert (said[output.request_id], kept.take_log_probs(name)) == wanted[output.request_id]
                assert not kept.take_token_ids(name) and not kept.take_log_probs(name)
    assert not any(engine.scheduler.given), "vLLM cuts no log-probs"


def test_what_a_step_says_besides_tokens_is_passed_on_with_those_before():
    engine = Engine()
    kept = steps.KeptTokens(engine)
    assert (
        engine.step(
            [engine_types.EngineCoreOutput("a-1", [5]), engine_types.EngineCoreOutput("b-2", [6])],
            [-0.5, -0.25],
        )
        == []
    )
    experts = np.zeros((1, 2, 2))
    (output,) = engine.step([engine_types.EngineCoreOutput("b-2", [7], routed_experts=experts)], [-0.75])
    assert output.new_token_ids == [6, 7] and output.routed_experts is experts
    assert kept.take_token_ids("a") == [5], "of a request that is paused"
    assert (
        engine.step(
            [engine_types.EngineCoreOutput("a-1", [8]), engine_types.EngineCoreOutput("b-2", [9])],
            [-1.0, -2.0],
        )
        == []
    )
    kept.forget(["b"])
    assert (kept.take_token_ids("a"), kept.take_log_probs("a")) == ([8], [-0.5, -1.0])
    assert (kept.take_token_ids("b"), kept.take_log_probs("b")) == ([], [])


def test_it_is_left_to_vllm_where_it_counts_or_schedules_elsewhere():
    assert steps.KeptTokens.can_keep(Engine()) and not steps.KeptTokens.can_keep(Engine(log_stats=True))
    assert not steps.KeptTokens.can_keep(SimpleNamespace(engine_core=SimpleNamespace(), log_stats=False))

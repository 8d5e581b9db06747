"""Each public method of the client `tinker`, unmodified, against a server of ours: run by its own Python.

python tinker_api.py BASE: TINKER_BASE_URL and TINKER_API_KEY are of the server. Ends with 0 if the methods
are those of the tables below, and each does what its table says.
"""

import inspect
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

LOCAL = {
    "ServiceClient": {"create_rest_client", "get_console_url", "get_telemetry"},
    "TrainingClient": {"get_console_url", "get_telemetry"},
    "SamplingClient": {"create", "get_sampler_handle", "get_telemetry", "on_queue_state_change"},
    "RestClient": {"get_telemetry"},
}
"""Methods that ask no server."""
TOKENS = [5, 6, 7, 8, 9]
PROMPT = types.ModelInput.from_ints(TOKENS[:3])
ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
INPUTS = {"target_tokens": TOKENS[1:], "weights": [0.0, 1.0, 1.0, 0.5]}
DATUM = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=INPUTS)


class Session:
    """The clients, and what the methods before have left."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.service = tinker.ServiceClient(user_metadata={"who": "test"}, display_name="methods")
        self.rest = tinker.RestClient()
        self.model = self.service.create_lora_training_client(base_model=base, rank=4, seed=1).result()
        self.session = self.model.model_id.partition(":")[0]
        self.state = self.model.save_state("state", user_metadata={"step": "0"}).result().path
        self.weights = self.model.save_weights_for_sampler("sampler").result().path
        self.sampler = self.service.create_sampling_client(model_path=self.weights)

    def refused(self, call: Callable[[], Any], kind: type[Exception], text: str) -> None:
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")

    def losses_fall(self) -> None:
        losses = []
        for _ in range(3):
            trained = self.model.forward_backward([DATUM, DATUM], "cross_entropy")
            assert "grad_norm:mean" in self.model.optim_step(ADAM).result().metrics
            losses.append(trained.result().metrics["loss:sum"])
        assert losses == sorted(losses, reverse=True)
        many = self.model.forward_backward([DATUM] * 1500, "cross_entropy").result()
        assert len(many.loss_fn_outputs) == 1500, "which come in parts, the first one last"
        failed = tinker.RequestFailedError
        self.refused(
            lambda: self.model.forward_backward([DATUM], "gspo").result(), failed, "no public definition"
        )

    def loaded(self, model: Any) -> None:
        model = model.result() if hasattr(model, "result") else model
        assert model.forward([DATUM], "cross_entropy").result().metrics["loss:sum"] > 0

    def external(self) -> None:
        path = self.model.save_weights_external("adapter").result().path
        urls = self.rest.get_external_weights_urls(path).result().urls
        assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
        with tempfile.TemporaryDirectory() as folder:
            for name, url in urls.items():
                urllib.request.urlretrieve(url, Path(folder) / name)
            assert (Path(folder) / "adapter_model.safetensors").stat().st_size > 1000
        asked = urls["adapter_config.json"].replace("code=", "code=0")
        self.refused(lambda: urllib.request.urlopen(asked), urllib.error.HTTPError, "403")
        self.refused(
            lambda: self.model.save_weights_external("a", age_encryption_recipients=["age1"]).result(),
            tinker.RequestFailedError,
            "not encrypted",
        )

    def sampled(self) -> None:
        params = types.SamplingParams(max_tokens=6, seed=3, stop=["zz"])
        found = self.sampler.sample(PROMPT, 2, params, include_prompt_logprobs=True).result()
        top = self.sampler.sample(
            PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
        ).result()
        assert top.topk_prompt_logprobs[0] is None and len(top.topk_prompt_logprobs) == 3
        by_word = [dict(one) for one in top.topk_prompt_logprobs[1:]]
        for word, told, some in zip(TOKENS[1:3], top.prompt_logprobs[1:], by_word, strict=True):
            assert len(some) == 3 and some.get(word, told) == told and max(some.values()) >= told
        assert [len(one) for one in top.sequences[0].topk_logprobs] == [2] * len(top.sequences[0].tokens)
        self.words_scored(params, top)
        again = self.sampler.sample(PROMPT, 2, params).result()
        assert [one.tokens for one in found.sequences] == [one.tokens for one in again.sequences]
        assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == 3

    def words_scored(self, params: types.SamplingParams, top: types.SampleResponse) -> None:
        """Words of the prompt that the client names, dense and sparse, or that are drawn; a part of it."""
        dense = torch.tensor([[TOKENS[1], 9, 3], [11, -1, TOKENS[2]]])
        sparse = torch.full((2, 16), -1)
        sparse[0, 4], sparse[1, 11] = TOKENS[1], TOKENS[2]
        known = [dict(one) for one in top.topk_prompt_logprobs[1:]]
        for ids in (dense, sparse):
            targets = types.TensorData.from_torch_sparse(ids, pad_value=-1)
            scored = self.sampler.sample(
                PROMPT,
                1,
                params,
                include_prompt_logprobs=True,
                topk_prompt_logprobs=3,
                target_prompt_logprobs=targets,
                prompt_alt_tokens_k=5,
                prompt_logprobs_last_n=1,
            ).result()
            told = scored.target_prompt_logprobs
            assert (told.sparse_crow_indices is None) == (ids is dense)
            told = told.to_torch()
            own = [told[row][ids[row] == TOKENS[row + 1]].item() for row in range(2)]
            np.testing.assert_allclose(own, top.prompt_logprobs[1:], atol=1e-6)
            assert torch.equal(told < 0, ids >= 0), "0 where nothing was asked for"
            assert scored.prompt_logprobs == [None, None, top.prompt_logprobs[2]]
            assert scored.topk_prompt_logprobs == [None, None, top.topk_prompt_logprobs[2]]
            drawn = scored.prompt_alt_tokens
            words, log_probs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
            assert words.shape == log_probs.shape == (2, 5)
            for row, likely in enumerate(known):
                for word, one in zip(words[row].tolist(), log_probs[row], strict=True):
                    assert abs(likely.get(word, one) - one) < 1e-6 and one < max(likely.values()) + 1e-6
        for more, text in (
            ({"target_prompt_logprobs": types.TensorData.from_torch(dense[:1])}, "a row for each token"),
            ({"target_prompt_logprobs": types.TensorData.from_torch(dense + 10**6)}, "ids below"),
            ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "1 to 2 are served"),
            ({"prompt_alt_tokens_k": 1000}, "0 to 128 are served"),
        ):
            self.refused(
                lambda more=more: self.sampler.sample(PROMPT, 1, params, **more).result(),
                tinker.RequestFailedError,
                text,
            )
        stable = self.service.create_sampling_client(model_path=self.weights, record_stability_info=True)
        self.refused(
            lambda: stable.sample(PROMPT, 1, params).result(),
            tinker.RequestFailedError,
            "no public definition",
        )

    def listed(self) -> None:
        found = {
            one.tinker_path: one
            for one in self.rest.list_checkpoints(self.model.model_id).result().checkpoints
        }
        assert {self.state, self.weights} <= found.keys()
        assert found[self.state].user_metadata == {"step": "0"} and found[self.state].size_bytes > 0
        page = self.rest.list_user_checkpoints(limit=1).result()
        assert len(page.checkpoints) == 1 and page.cursor.total_count >= 2

    def published(self, public: bool) -> None:
        change = "publish" if public else "unpublish"
        getattr(self.rest, f"{change}_checkpoint_from_tinker_path")(self.state).result()
        (one,) = (
            x for x in self.rest.list_user_checkpoints().result().checkpoints if x.tinker_path == self.state
        )
        assert one.public == public

    def deleted(self, by_path: bool) -> None:
        path = self.model.save_state("gone").result().path
        run, kind, name = path.removeprefix("tinker://").split("/")
        if by_path:
            self.rest.delete_checkpoint_from_tinker_path(path).result()
        else:
            self.rest.delete_checkpoint(run, f"{kind}/{name}").result()
        self.refused(
            lambda: self.model.load_state(path).result(), tinker.RequestFailedError, "nothing was saved"
        )
        self.refused(
            lambda: self.rest.delete_checkpoint_from_tinker_path(path).result(),
            tinker.NotFoundError,
            "nothing",
        )

    def kept_until(self) -> None:
        self.rest.set_checkpoint_ttl_from_tinker_path(self.state, 3600).result()
        (one,) = (
            x for x in self.rest.list_user_checkpoints().result().checkpoints if x.tinker_path == self.state
        )
        assert one.expires_at is not None
        self.rest.set_checkpoint_ttl_from_tinker_path(self.state, None).result()

    def custom(self) -> None:
        def loss(data: Any, logprobs: Any) -> Any:
            total = sum((-2 * one).sum() for one in logprobs)
            return total, {"mine:sum": float(total)}

        assert "mine:sum" in self.model.forward_backward_custom([DATUM], loss).result().metrics
        self.model.optim_step(ADAM).result()

    def methods(self) -> dict[str, dict[str, Callable[[], Any]]]:
        """Class -> method -> what is tried; in this order."""
        service, model, sampler, rest, gone = (
            self.service,
            self.model,
            self.sampler,
            self.rest,
            tinker.NotFoundError,
        )
        return {
            "ServiceClient": {
                "create_lora_training_client": lambda: self.loaded(
                    service.create_lora_training_client(base_model=self.base, rank=2, train_mlp=False)
                ),
                "create_training_client_from_state": lambda: self.loaded(
                    service.create_training_client_from_state(self.state)
                ),
                "create_training_client_from_state_with_optimizer": lambda: self.loaded(
                    service.create_training_client_from_state_with_optimizer(self.state)
                ),
                "create_sampling_client": lambda: (
                    service.create_sampling_client(base_model=self.base)
                    .sample(PROMPT, 1, types.SamplingParams(max_tokens=2))
                    .result()
                ),
                "create_custom_loss": lambda: None,  # forward_backward_custom
                "copy_weights": lambda: self.loaded(
                    service.create_training_client_from_state(
                        tinker.ServiceClient(project_id="any")
                        .copy_weights(self.state, ttl_seconds=3600)
                        .result()
                    )
                ),
                "get_server_capabilities": lambda: service.get_server_capabilities().supported_models[0],
            },
            "TrainingClient": {
                "forward": lambda: model.forward([DATUM], "cross_entropy").result(),
                "forward_backward": self.losses_fall,
                "forward_backward_custom": self.custom,
                "optim_step": lambda: self.refused(
                    lambda: model.optim_step(types.AdamParams(learning_rate=-1.0)).result(),
                    tinker.RequestFailedError,
                    "numbers from 0 on",
                ),
                "get_info": lambda: np.testing.assert_equal(model.get_info().lora_rank, 4),
                "get_tokenizer": lambda: model.get_tokenizer().encode("a"),
                "save_state": lambda: self.refused(
                    lambda: model.save_state("state").result(), tinker.RequestFailedError, "is there already"
                ),
                "load_state": lambda: model.load_state(self.state).result(),
                "load_state_with_optimizer": lambda: model.load_state_with_optimizer(self.state).result(),
                "save_weights_for_sampler": lambda: self.weights.index("/sampler_weights/"),
                "save_weights_and_get_sampling_client": lambda: (
                    model.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
                ),
                "create_sampling_client": lambda: model.create_sampling_client(self.weights),
                "save_weights_external": self.external,
            },
            "SamplingClient": {
                "sample": self.sampled,
                "compute_logprobs": lambda: np.testing.assert_equal(
                    len(sampler.compute_logprobs(PROMPT).result()), 3
                ),
                "get_base_model": lambda: np.testing.assert_equal(sampler.get_base_model(), self.base),
                "get_tokenizer": lambda: sampler.get_tokenizer().encode("a"),
                "from_sampler_handle": lambda: tinker.SamplingClient.from_sampler_handle(
                    sampler.get_sampler_handle()
                ).compute_logprobs(PROMPT),
            },
            "RestClient": {
                "get_server_capabilities": lambda: rest.get_server_capabilities().result(),
                "get_training_run": lambda: np.testing.assert_equal(
                    rest.get_training_run(model.model_id).result().lora_rank, 4
                ),
                "get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(
                    self.state
                ).result(),
                "get_weights_info_by_tinker_path": lambda: np.testing.assert_equal(
                    rest.get_weights_info_by_tinker_path(self.state).result().train_unembed, False
                ),
                "list_training_runs": lambda: rest.list_training_runs().result().training_runs[0],
                "list_checkpoints": self.listed,
                "list_user_checkpoints": self.listed,
                "get_sampler": lambda: rest.get_sampler(
                    rest.get_session(self.session).result().sampler_ids[0]
                ).result(),
                "get_session": lambda: (
                    rest.get_session(self.session).result().training_run_ids.index(model.model_id)
                ),
                "list_sessions": lambda: rest.list_sessions().result().sessions.index(self.session),
                "publish_checkpoint_from_tinker_path": lambda: self.published(True),
                "unpublish_checkpoint_from_tinker_path": lambda: self.published(False),
                "set_checkpoint_ttl_from_tinker_path": self.kept_until,
                "copy_weights": lambda: rest.copy_weights(self.state, "any").result(),
                "get_external_weights_urls": self.external_urls,
                "delete_checkpoint": lambda: self.deleted(False),
                "delete_checkpoint_from_tinker_path": lambda: self.deleted(True),
                "get_current_checkpoint_storage_usage": lambda: (
                    rest.get_current_checkpoint_storage_usage().result()
                ),
                "search_sessions": lambda: self.refused(
                    lambda: rest.search_sessions(types.SessionSearchRequest()).result(), gone, "list_sessions"
                ),
                "assign_session_project": lambda: self.refused(
                    lambda: rest.assign_session_project(self.session, "p").result(), gone, "no projects"
                ),
                "export_session_trace": lambda: self.refused(
                    lambda: rest.export_session_trace(self.session).result(), gone, "siirl view"
                ),
                "get_audit_log": lambda: self.refused(
                    lambda: rest.get_audit_log().result(), gone, "no audit log"
                ),
                "get_billing_usage": lambda: self.refused(
                    lambda: rest.get_billing_usage("2026-01-01", "2026-02-01").result(),
                    gone,
                    "nothing is billed",
                ),
                "whoami": lambda: self.refused(lambda: rest.whoami().result(), Exception, ""),
            },
        }

    def external_urls(self) -> None:
        self.refused(lambda: self.rest.get_external_weights_urls(self.state).result(), ValueError, "external")


def main(base: str) -> None:
    import warnings

    warnings.simplefilter("ignore", FutureWarning)  # the deprecated names are tried, too
    session = Session(base)
    for name, tried in session.methods().items():
        public = {
            one for one, _ in inspect.getmembers(getattr(tinker, name), callable) if not one.startswith("_")
        }
        plain = {one for one in public if one.removesuffix("_async") == one}
        assert {one.removesuffix("_async") for one in public} == plain, (
            "each asynchronous one has a plain one"
        )
        held = tried.keys() | LOCAL[name] | ({"close"} if name == "ServiceClient" else set())
        assert plain == held, (name, plain ^ held)
        for method, call in tried.items():
            try:
                call()
            except BaseException:
                print(f"{name}.{method} failed", flush=True)
                raise
            print(f"{name}.{method}", flush=True)
    session.service.close(status="success").result()


if __name__ == "__main__":
    main(sys.argv[1])

"""What siirl knows of vLLM's own interfaces, versions 0.24 to 0.32: only native*.py depend on them.

Imported in an engine process and in vLLM's workers, never in a training worker.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import ModelRegistry
from vllm import SamplingParams as VLLMSamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from siirl.data.completions import PAUSED, Completion, Request
from siirl.engines.rollout.sampling import later_seed
from siirl.engines.rollout.served.draws import signed
from siirl.engines.rollout.served.messages import UNKNOWN, Answer, RowScores
from siirl.engines.rollout.vllm.arguments import experts_of, replayed_layers
from siirl.engines.rollout.vllm.native_draws import draw_by_seeds
from siirl.engines.rollout.vllm.native_places import ParameterMap, read_parameter
from siirl.engines.rollout.vllm.native_steps import KeptTokens, ask_for_slots_once_a_block, own_name
from siirl.engines.rollout.vllm.native_transfer import TRANSFER_BACKEND
from siirl.errors import ConfigError, NotSupportedError, RolloutError
from siirl.models.families import family_of
from siirl.spelling import suggest

LOG_PROBS_MODE = "processed_logprobs"
"""At the sampling temperature; and before top-k and top-p, see native_draws."""
OF_IMAGES = {
    "mm_processor_cache_gb": 0,  # of what vLLM's own processor makes
    "mm_device_do_normalize": False,  # from 0.32 on, vLLM would take pixels as the file has them
}
"""Arguments of an engine that is given patches of images."""
TEXTS = ("Qwen3_5ForCausalLM",)
"""Classes of native_texts.py, which vLLM has from 0.32 on."""
for name in TEXTS:  # by its name, as vLLM looks at a class in another process; its workers import this, too
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, f"siirl.engines.rollout.vllm.native_texts:{name}")


class NativeEngine:
    """A vLLM engine in this process: requests in, finished responses out, weights through BucketTransfer."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start it; arguments: those of vLLM's EngineArgs. ConfigError for one that vLLM does not have."""
        known = {item.name for item in dataclasses.fields(EngineArgs)}
        for name in arguments:
            if name not in known:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}: vLLM's engine has no such "
                    f"argument. {suggest(name, known)}"
                )
        fixed = {
            "logprobs_mode": LOG_PROBS_MODE,
            "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
            "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        }
        self._expert_layers = replayed_layers(arguments)
        self._images = _image_prompts(arguments["model"])
        if self._images is not None:
            fixed |= {name: value for name, value in OF_IMAGES.items() if name in known}
            if arguments["tensor_parallel_size"] > 1:
                fixed["additional_config"] = self._images
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments | fixed))
        self._engine.collective_rpc("draw_by_seeds")
        ask_for_slots_once_a_block(self._engine)
        self._kept = KeptTokens(self._engine) if KeptTokens.can_keep(self._engine) else None
        self._adapters: dict[str | None, LoRARequest] = {}
        self._learns = False
        self._is_outdated = False  # what was computed before an update in place, until `rest` forgets it

    def add(self, request: Request, adapter: str | None) -> None:
        """Queue one response. Its seed makes it independent of what else is in the batch.

        adapter: under which name it was loaded; None: the model alone.
        """
        self.rest()
        params = request.params
        seed = signed(later_seed(request.seed, request.start))
        sampling = VLLMSamplingParams(
            n=1,
            temperature=params.temperature,
            top_k=params.top_k if params.top_k > 0 else 0,
            top_p=params.top_p,
            seed=seed if params.temperature else None,
            max_tokens=params.max_tokens,
            stop_token_ids=[] if params.ignore_eos else list(params.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if request.seen.images:
            if self._images is None:
                raise NotSupportedError("not supported yet: images for a model that reads texts")
            prompt = self._images.prompt(request.prompt, request.seen)
        if adapter is not None and adapter not in self._adapters:
            raise RolloutError(f"vLLM has no adapter {adapter!r}: it would sample from the base alone.")
        lora = None if adapter is None else self._adapters[adapter]
        self._engine.add_request(str(request.key), prompt, sampling, lora_request=lora)

    def add_scored(self, number: int, tokens: list[int], top_k: int) -> None:
        """Queue a row whose tokens are there, see RolloutEngine.score; nobody reads the one that follows."""
        self.rest()
        sampling = VLLMSamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)

    def step(self) -> list[Answer]:
        """One iteration of the scheduler and the model; the responses that it completed."""
        return [self._response(out, out.outputs[0].finish_reason or "unknown") for out in self._finished()]

    def step_scored(self, starts: list[int]) -> dict[int, RowScores]:
        """The same for rows, by their numbers. starts: from where on what is said of each counts."""
        numbered = {int(own_name(output.request_id)): output for output in self._finished()}
        self._forget_tokens(map(str, numbered))
        return {number: _row_scores(output, starts[number]) for number, output in numbered.items()}

    def _finished(self) -> list[RequestOutput]:
        return [output for output in self._engine.step() if output.finished]

    def stop(self, request_ids: list[str]) -> list[Answer]:
        """End requests that were added under these names; what there is of each, maybe nothing."""
        processor, outputs = self._engine.output_processor, []
        running = [known for name in request_ids for known in processor.external_req_ids.get(name, ())]
        for known in running:
            state = processor.request_states[known]
            if self._kept is not None:
                state.detokenizer.update(self._kept.take_token_ids(own_name(known)), False)
            outputs.append(state.make_request_output([], None, FinishReason.ABORT, None))
        self._engine.abort_request(running, internal=True)
        return [self._response(output, PAUSED) for output in outputs]

    def _response(self, output: RequestOutput, reason: str) -> Answer:
        name, sampled, experts = own_name(output.request_id), output.outputs[0], None
        if self._kept is None:
            log_probs = [sampled.logprobs.logprobs[start] for start in sampled.logprobs.start_indices]
        else:
            log_probs = self._kept.take_log_probs(name)
        if self._expert_layers is not None and sampled.token_ids:
            num_tokens = len(output.prompt_token_ids or ()) + len(sampled.token_ids)
            experts = experts_of(sampled.routed_experts, self._expert_layers, num_tokens)
        completion = Completion(
            token_ids=list(sampled.token_ids),
            log_probs=log_probs,
            finish_reason=reason,
            weight_version=UNKNOWN,
            experts=experts,
        )
        return Answer(name, completion, output.num_cached_tokens or 0)

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests that were added under these names."""
        self._engine.abort_request(request_ids)
        self._forget_tokens(request_ids)

    def sleep(self, keeps_weights: bool) -> None:
        """Give back the device memory of weights and KV cache. The weights are gone, or in host memory.

        A step that was begun ahead may still run, and not every version waits for it before it unmaps.
        """
        self._engine.collective_rpc("prepare_sleep")
        self._engine.sleep(level=1 if keeps_weights else 2)

    def wake(self, part: str) -> None:
        """Take memory again: part "weights" or "kv_cache"."""
        self._engine.wake_up(tags=[part])

    def begin_update(self, tensors: dict[str, list] | None = None) -> None:
        """Begin to replace the weights; adapters are forgotten.

        tensors: of the files, of which it is found out where they land, see WeightWriter; None: it is not.
        """
        self._engine.collective_rpc("unwrap_layers")
        self._engine.collective_rpc("unpack_experts")
        self._engine.collective_rpc("start_weight_update")
        self._learns = tensors is not None
        if tensors is not None:
            self._engine.collective_rpc("learn_places", kwargs=tensors)

    def update(self, bucket: dict[str, Any]) -> None:
        """Load the tensors of a bucket (see BucketInfo) in all workers of the engine."""
        self._engine.collective_rpc("update_weights", kwargs={"update_info": bucket})

    def finish_update(self) -> str:
        """Complete an update; what was computed with other weights is forgotten.

        Returns why weights cannot be written in place; "" if they can be from now on, where that was asked.
        """
        self._engine.collective_rpc("finish_weight_update")
        reasons = self._engine.collective_rpc("check_places") if self._learns else []
        self._engine.collective_rpc("complete_update")
        self._engine.collective_rpc("wrap_layers")
        self._forget()
        return next(filter(None, reasons), "")

    def kept_boxes(self) -> list[list[Any] | None]:
        """Of each worker the rectangles of tensors that it keeps, if that is what they are."""
        return self._engine.collective_rpc("kept_boxes")

    def take_parts(self, of_workers: list[Any] | None) -> None:
        """The next writes bring these parts of tensors to each worker; None: whole tensors."""
        self._engine.collective_rpc("take_parts", args=(of_workers,))

    def begin_writing(self) -> None:
        """Begin to write the weights in place."""
        self._engine.collective_rpc("begin_places")

    def write(self, filling: dict[str, Any] | list[Any]) -> None:
        """Write what is in the sender's buffer, see WeightWriter.fillings, in all workers of the engine."""
        self._engine.collective_rpc("write_places", args=(filling,))

    def finish_writing(self, filling: dict[str, Any] | list[Any]) -> None:
        """Write the last filling, and complete an update in place, as finish_update; `rest` is due then."""
        self._engine.collective_rpc("finish_places", args=(filling,))
        self._is_outdated = True

    def rest(self) -> None:
        """What no answer waits for: called after each, and before there is something to sample."""
        if self._is_outdated:
            self._forget()
            self._is_outdated = False

    def _forget_tokens(self, names: Iterable[str]) -> None:
        if self._kept is not None:
            self._kept.forget(names)

    def _forget(self) -> None:
        """Drop what was computed with other weights."""
        if self._images is not None:
            self._engine.reset_encoder_cache()
        self._engine.reset_prefix_cache()

    def load_adapter(self, name: str, number: int, folder: str) -> None:
        """Load a LoRA adapter as peft stores it, in the place of the one before under this name and number.

        The folder is not read again.
        """
        if number in self._engine.list_loras():
            self._engine.remove_lora(number)
        self._adapters[name] = LoRARequest(name, number, folder)
        self._engine.add_lora(self._adapters[name])
        self._engine.reset_prefix_cache()

    def read_tensor(self, name: str) -> list[tuple[list[float], list[int]]]:
        """A parameter under vLLM's own name, float32, of each worker: values and shape."""
        return self._engine.collective_rpc("read_tensor", args=(name,))

    def stats(self) -> dict[str, float]:
        """Counters and gauges of vLLM since its start, by their own names; none with disable_log_stats."""
        if not self._engine.log_stats:
            return {}
        values = {metric.name: getattr(metric, "value", None) for metric in self._engine.get_metrics()}
        return {name: float(value) for name, value in values.items() if value is not None}


def _image_prompts(model: str) -> Any:
    """What makes prompts with images for the model of a directory; None for one of texts."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    if not family_of(config.get("model_type")).sees_images:
        return None
    try:
        from siirl.engines.rollout.vllm.native_images import ImagePrompts

        return ImagePrompts(model)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"vLLM's code of vision models needs the package {error.name}, which is not installed. Install "
            "what vLLM names, or set rollout.name=hf."
        ) from error


def _row_scores(output: RequestOutput, start: int) -> RowScores:
    """vLLM gives of each token but the first its own log-prob, then those of the likeliest in its place."""
    flat = output.prompt_logprobs
    begin = flat.start_indices[start]
    token_ids, log_probs = (np.array(x[begin:]) for x in (flat.token_ids, flat.logprobs))
    return RowScores(token_ids.astype(np.int32).tobytes(), log_probs.astype(np.float32).tobytes())


class WorkerExtension:
    """Methods that vLLM's workers get from us: called by name through collective_rpc."""

    def draw_by_seeds(self) -> None:
        """See native_draws."""
        draw_by_seeds(self.model_runner)

    def unpack_experts(self) -> None:
        """On the CPU, give experts memory of the shapes in which weights come; complete_update packs it.

        A reload copies what came over what the kernel reads. vLLM's CPU kernels fill the width of experts up
        to a multiple of 32 with zeros: where they do, the one does not fit over the other.
        """
        if self.device.type != "cpu":
            return
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in _cpu_experts(self.model_runner.model):
            shapes, _ = get_layerwise_info(layer).restore_metadata
            for name in ("w13_weight", "w2_weight"):
                weight = getattr(layer, name)
                weight.data = weight.data.new_empty(shapes[name].shape)

    def complete_update(self) -> None:
        """Unmap the buffer in which the weights came; then as pack_layers."""
        self.weight_transfer_engine.shutdown()
        self.pack_layers()

    def pack_layers(self) -> None:
        """On the CPU, repack a tied output head, and experts.

        vLLM's CPU kernels multiply by a packed copy of a layer's weights. A reload packs those layers again
        that got weights under their own name, and a tied head gets them under the embedding's. Experts are
        packed when their kernel is built, and vLLM 0.32 builds it once.
        """
        if self.device.type != "cpu":
            return
        for layer in self.model_runner.model.modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
        for layer in _cpu_experts(self.model_runner.model):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def learn_places(self, names: list[str], shapes: list[list[int]], dtypes: list[str]) -> None:
        """Find out where the tensors of the files land: after the begin of an update, of each by loaders."""
        self._places = ParameterMap(self.model_runner.model, self.device, names, shapes, dtypes)
        with self._loading():
            self._places.learn()
        self.weight_transfer_engine.saw = self._places.saw

    def check_places(self) -> str:
        """After an update, why weights cannot be written in place, or ""."""
        self.weight_transfer_engine.saw = None
        self._places.check()
        return self._places.why_not

    def kept_boxes(self) -> list[Any] | None:
        """See ParameterMap.boxes."""
        return self._places.boxes()

    def take_parts(self, of_workers: list[Any] | None) -> None:
        """See ParameterMap.take_parts."""
        parts = None if of_workers is None else of_workers[self.rank]
        if parts is not None:
            parts = [(number, tuple(map(tuple, box))) for number, box in parts]
        self._places.take_parts(parts)

    def begin_places(self) -> None:
        """See ParameterMap.begin."""
        self.unpack_experts()
        with self._writing():
            self._places.begin()

    def write_places(self, filling: dict[str, Any] | list[Any]) -> None:
        """See ParameterMap.write. A list has a filling for each worker."""
        with self._writing():
            self._places.write(filling[self.rank] if isinstance(filling, list) else filling)

    def finish_places(self, filling: dict[str, Any] | list[Any]) -> None:
        """Write what comes last, and see ParameterMap.finish."""
        self.write_places(filling)
        with self._loading() if self._places.packs else nullcontext():
            self._places.finish()
        self.pack_layers()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What vLLM has around it while it loads; nothing else of this process is on the device meanwhile."""
        with set_current_vllm_config(self.vllm_config), torch.device(self.device), self._device_alone():
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The same for code of ours alone: without a default device, and parameters are plain tensors.

        With either each look at a tensor goes through Python; vLLM's parameters have a __torch_function__.
        """
        with torch._C.DisableTorchFunctionSubclass(), self._device_alone():
            yield

    @contextmanager
    def _device_alone(self) -> Iterator[None]:
        with torch.no_grad():
            self.settle_device()
            yield
            self.settle_device()

    def settle_device(self) -> None:
        """Wait for all that the device has been given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prepare_sleep(self) -> None:
        """As settle_device; and from now on the worker sleeps beside other processes on its device, too."""
        self.settle_device()
        if "sleep" not in vars(self):
            self.sleep = beside_others(self.sleep)

    def unwrap_layers(self) -> None:
        """Put layers in the place of those that add LoRA to them: weights are loaded by the layers' names."""
        model, self._wrappers = self.model_runner.model, {}
        if self.model_runner.lora_config:
            self.model_runner.lora_manager.remove_all_adapters()
            found = model.named_modules()
            self._wrappers = {name: layer for name, layer in found if isinstance(layer, BaseLayerWithLoRA)}
        for name, wrapper in self._wrappers.items():
            model.set_submodule(name, wrapper.base_layer)

    def wrap_layers(self) -> None:
        """Undo unwrap_layers."""
        for name, wrapper in self._wrappers.items():
            self.model_runner.model.set_submodule(name, wrapper)

    def read_tensor(self, name: str) -> tuple[list, list[int]]:
        """A parameter as plain numbers and its shape, for tests."""
        tensor = read_parameter(self.model_runner.model, name).detach().float().cpu()
        return tensor.flatten().tolist(), list(tensor.shape)


def beside_others(sleep: Callable[..., None]) -> Callable[..., None]:
    """A worker's sleep that is none the worse for memory which another process takes of the device meanwhile.

    vLLM's compares what is free of the whole device before and after, when all has been given back.
    """

    def slept(*args: Any, **kwargs: Any) -> None:
        try:
            sleep(*args, **kwargs)
        except AssertionError as error:
            if "increased after sleeping" not in str(error):
                raise

    return slept


def _cpu_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of experts whose weights a CPU kernel reads."""
    found = [layer for layer in model.modules() if "w13_weight" in layer._parameters]
    return [layer for layer in found if layer.get_parameter("w13_weight").device.type == "cpu"]

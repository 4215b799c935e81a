"""MiniMax-H3 as a family of `runtime.family`: requests, load order, and jobs. torch only inside `start`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loader.errors import ArtifactError
from runtime.families.minimax_h3.capabilities import capabilities_of
from runtime.families.minimax_h3.config import FPS
from runtime.families.minimax_h3.keyframes import fit_keyframes
from runtime.families.minimax_h3.order import Task, default_order
from runtime.families.minimax_h3.packing import pack
from runtime.families.minimax_h3.request import H3Request, parse_request
from runtime.families.minimax_h3.tokens import TokenStream, build_token_stream
from runtime.family import ImageResolver, MediaPlan, Prepared
from runtime.parallel.prepared import whole_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from loader.manifest import Manifest, ScheduleRecord
    from runtime.compute import Compute
    from runtime.families.minimax_h3.model.job import JobInput
    from runtime.families.minimax_h3.model.warm_up import MakeJob
    from runtime.families.minimax_h3.token_process import TokenProcess
    from runtime.family import Job
    from runtime.native_torch import NativeTorch
    from runtime.parallel.connect import Connection
    from runtime.parallel.family import RankJob
    from runtime.weights import WeightSource

TOKENIZER = "tokenizer/tokenizer.json"
EMBEDDING_TABLE = "text_encoder_embed/model.language_model.embed_tokens.weight"
_TYPICAL_PROMPT = "a lamp sways in the rain while somebody hums"


class MiniMaxH3:
    """One prepared directory of MiniMax-H3.

    Args:
        task, schedule: what a start without a request loads; empty: t2va (or the only task) and its default schedule.
    Raises: ArtifactError: the manifest's configuration or schedules are incomplete, or the defaults are not prepared.
    """

    def __init__(self, manifest: Manifest, directory: Path, task: str = "", schedule: str = "") -> None:
        self.capabilities = capabilities_of(manifest)
        self._manifest = manifest
        self._directory = directory
        self._tokenizer: Tokenizer | None = None
        self._token_process: TokenProcess | None = None
        self._default_order = default_order(manifest, task, schedule)

    def parse(self, body: Mapping[str, object], resolve_image: ImageResolver | None = None) -> H3Request:
        return parse_request(body, self.capabilities, resolve_image=resolve_image)

    def spawn_tokenizer(self) -> None:
        """See `runtime.family.Family`."""
        from runtime.families.minimax_h3.token_process import TokenProcess

        self.stop_tokenizer()
        with contextlib.suppress(OSError):
            self._token_process = TokenProcess(self._directory / TOKENIZER)

    def stop_tokenizer(self) -> None:
        process, self._token_process = self._token_process, None
        if process is not None:
            process.close()

    def prepare(self, request: H3Request) -> Prepared:
        """Tokens, keyframes on the canvas, packed layout. Raises: RequestError (prompt too long)."""
        import numpy

        config = self.capabilities.config
        fitted = fit_keyframes(
            request.keyframes, request.width, request.height, crop_anchor=request.anchor_fit == "cover_crop"
        )
        canvas = (request.width, request.height)
        tokens = self._tokens(request.prompt, [canvas] * len(fitted))
        sequence = pack(
            config,
            tokens.tags,
            request.latent_shape(config),
            request.num_audio_latents,
            [frame.anchor for frame in fitted],
        )
        record = self._schedule_record(request.task, request.schedule.name)
        return Prepared(
            request=request,
            order=f"{request.task}/{request.schedule.name}",
            media=MediaPlan(
                request.width, request.height, request.num_frames, FPS, config.audio_vae.sampling_rate
            ),
            report={**request.report(), "keyframe_transforms": [frame.transform for frame in fitted]},
            rows={EMBEDDING_TABLE: sorted(set(tokens.ids))},
            parts={
                "tokens": tokens,
                "sequence": sequence,
                "keyframes": tuple(numpy.asarray(frame.image).copy() for frame in fitted),
                "table_key": f"{record.name}.{record.task}",
                "condition_index": record.condition_index if request.task == "fl2va" else None,
            },
        )

    def _tokens(self, prompt: str, keyframe_sizes: Sequence[tuple[int, int]]) -> TokenStream:
        """Of the process that was spawned for it, or made here."""
        config, process = self.capabilities.config, self._token_process
        stream = None if process is None else process.stream(config, prompt, keyframe_sizes)
        self.stop_tokenizer()
        return stream or build_token_stream(config, self._load_tokenizer(), prompt, keyframe_sizes)

    def import_models(self) -> None:
        """Import the numerical modules (and torch, if nobody has)."""
        import runtime.families.minimax_h3.model.parts  # noqa: F401 (the import is the work)

    def warm_up(self, prepared: Prepared | None, compute: Compute) -> None:
        """Without a request, run a typical one on zeros; with one, build the plan of its attention."""
        if prepared is not None:
            self.warm_attention(prepared, compute, ranks=1)
        else:
            self._run_on_zeros(compute, self._make_job(compute))

    def warm_attention(self, prepared: Prepared, compute: Compute, ranks: int) -> None:
        """See `runtime.parallel.family.RankFamily`."""
        config = self.capabilities.config.transformer
        rows, heads = prepared.parts["sequence"].num_rows, config.num_attention_heads // ranks
        compute.warm_attention(rows, heads, config.attention_head_dim)

    def native_operations(
        self,
        prepared: Prepared | None,
        native: NativeTorch,
        items: Collection[str],
        ranks: int = 1,
        is_sharded: bool = False,
    ) -> Iterator[str]:
        """See `runtime.parallel.family.RankFamily`."""
        from runtime.families.minimax_h3.native_operations import operations
        from runtime.families.minimax_h3.shards import share_of

        if self._manifest.model["dtype"] != "BF16":
            return iter(())
        config, sequence = self.capabilities.config, None if prepared is None else prepared.parts["sequence"]
        return operations(native, items, config, sequence, share_of(config, ranks, is_sharded))

    def warm_up_libraries(
        self, prepared: Prepared, device: str, ranks: int = 1, is_sharded: bool = False
    ) -> None:
        """See `runtime.parallel.family.RankFamily`."""
        from loader.torch_api import torch_dtype
        from runtime.families.minimax_h3.model.first_uses import multiply_first
        from runtime.families.minimax_h3.shards import share_of

        rows, dtype = prepared.parts["sequence"].num_text, torch_dtype(str(self._manifest.model["dtype"]))
        config = self.capabilities.config
        multiply_first(config, rows, dtype, device, share_of(config, ranks, is_sharded))

    def warm_up_conditioner(self, prepared: Prepared, compute: Compute) -> None:
        from runtime.families.minimax_h3.model.flash_by_name import without_choosing
        from runtime.families.minimax_h3.model.warm_up import condition_on_zeros

        beside = without_choosing(compute)
        condition_on_zeros(self._job_input(prepared), self._manifest, beside, self._make_job(beside))

    def warm_up_denoiser(self, prepared: Prepared, compute: Compute, items: Sequence[str]) -> bool:
        if not items:
            return False  # not even an import on the way to the first step
        from runtime.families.minimax_h3.model.warm_denoiser import warm_denoiser

        warm_denoiser(self._job_input(prepared), self._manifest, compute, items)
        return "step" in items

    def _make_job(self, compute: Compute) -> MakeJob:
        from runtime.families.minimax_h3.model.job import H3Job
        from runtime.families.minimax_h3.model.parts import one_rank

        return lambda given, weights: H3Job(
            given, whole_weights(weights, self._manifest), compute.device, one_rank(compute)
        )

    def _run_on_zeros(self, compute: Compute, make_job: MakeJob) -> None:
        from runtime.families.minimax_h3.model.warm_up import run_on_zeros

        if self._default_order.partition("/")[0] != "t2va":
            return  # a typical request would need pictures
        prepared = self.prepare(self.parse({"prompt": _TYPICAL_PROMPT, "seed": 0}))
        run_on_zeros(self._job_input(prepared), self._manifest, compute, make_job)

    def start(self, prepared: Prepared, weights: WeightSource, compute: Compute) -> Job:
        return self._make_job(compute)(self._job_input(prepared), weights)

    def start_on_ranks(
        self,
        prepared: Prepared,
        weights: WeightSource,
        compute: Compute,
        connection: Connection,
        is_sharded: bool,
    ) -> RankJob:
        """See `runtime.parallel.family.RankFamily`."""
        from runtime.families.minimax_h3.model.ranks_job import RanksJob

        return RanksJob(self._job_input(prepared), weights, compute, connection, is_sharded)

    def warm_up_on_ranks(
        self,
        prepared: Prepared | None,
        compute: Compute,
        connection: Connection,
        hold: Callable[[WeightSource], WeightSource],
        is_sharded: bool,
    ) -> None:
        """See `runtime.parallel.family.RankFamily`."""
        from runtime.families.minimax_h3.model.flash_by_name import without_choosing
        from runtime.families.minimax_h3.model.ranks_job import RanksJob
        from runtime.families.minimax_h3.model.warm_up import condition_on_zeros

        used = compute if prepared is None else without_choosing(compute)

        def make_job(given: JobInput, weights: WeightSource) -> RanksJob:
            return RanksJob(given, hold(weights), used, connection, is_sharded)

        if prepared is None:
            self._run_on_zeros(used, make_job)
        else:
            condition_on_zeros(self._job_input(prepared), self._manifest, used, make_job)

    def _job_input(self, prepared: Prepared) -> JobInput:
        from runtime.families.minimax_h3.model.job import JobInput

        request: H3Request = prepared.request
        return JobInput(
            config=self.capabilities.config,
            media=prepared.media,
            schedule=request.schedule,
            seed=request.seed,
            noise_mode=request.noise,
            **prepared.parts,
        )

    def _schedule_record(self, task: Task, name: str) -> ScheduleRecord:
        found = (r for r in self._manifest.schedules if r.task == task and r.name == name)
        return next(found)  # parse_request accepts prepared schedules only

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            path = self._directory / TOKENIZER
            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:
                raise ArtifactError(f"cannot be read as a tokenizer: {error}", where=str(path)) from error
        return self._tokenizer

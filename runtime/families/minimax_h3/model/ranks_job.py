"""One MiniMax-H3 request on several ranks: the parts of a job that ranks share."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from runtime.compute import Compute
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.conditioner import encode_prompt, layer_forward
from runtime.families.minimax_h3.model.job import H3Job, JobInput, JobParts
from runtime.families.minimax_h3.model.parts import decoder_operators
from runtime.families.minimax_h3.model.ranks_conditioner import SummedLayer
from runtime.families.minimax_h3.model.ranks_transformer import RanksTransformer, refine_text_on_ranks
from runtime.families.minimax_h3.model.ranks_video import RanksVideoUnits
from runtime.families.minimax_h3.shards import check_ranks, cuts_conditioner, gathers_hidden
from runtime.parallel.connect import Connection
from runtime.weights import WeightSource


class RanksJob(H3Job):
    """See `H3Job`. The same calls on all ranks; rank 0 gets the frames and may give the request up between them.

    Args:
        is_sharded: the weights are this rank's shards (`shards.cut_of`), not whole.
    Raises: CapabilityError: the heads do not divide.
    """

    def __init__(
        self,
        given: JobInput,
        weights: WeightSource,
        compute: Compute,
        connection: Connection,
        is_sharded: bool,
    ) -> None:
        ranks, control, config = connection.ranks, connection.control, given.config
        check_ranks(config, ranks.size)
        self._connection = connection
        self._video: RanksVideoUnits | None = None
        is_cut = is_sharded and cuts_conditioner(config, ranks.size)
        encode_whole = partial(
            encode_prompt,
            attention=compute.short_attention,
            layer=SummedLayer(ranks) if is_cut else layer_forward,
        )

        def encode(*arguments: Any) -> Tensor:
            with control.section("conditioner"):
                return encode_whole(*arguments)

        def refine(config: H3Config, weights: WeightSource, prompt_embeds: Tensor) -> Tensor:
            with control.section("refiner"):
                return refine_text_on_ranks(config, weights, prompt_embeds, ranks, compute.short_attention)

        transformer = partial(
            RanksTransformer,
            attention=compute.attention,
            operators=compute.operators,
            ranks=ranks,
            control=control,
            is_sharded=is_sharded and gathers_hidden(ranks.size),
        )
        parts = JobParts(encode, refine, transformer, self._video_units, decoder_operators(compute))
        super().__init__(given, weights, compute.device, parts)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which gets units and samples."""
        return self._connection.control.leads

    def close(self) -> None:
        """On rank 0, when the request is given up: bring all ranks to a border."""
        if self._video is not None:
            self._video.close()

    def _video_units(self, given: JobInput, decoder: Any) -> RanksVideoUnits:
        self._video = RanksVideoUnits(given, decoder, self._connection.ranks, self._connection.control)
        return self._video

"""What must hold of the usage behind any stream, whatever was asked for and whatever failed on the way."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.v1 import inference_pb2


def check_usage(
    usage: inference_pb2.Usage, num_output_tokens: int, draft_tokens: Sequence[inference_pb2.DraftToken] = ()
) -> None:
    """Holds a request's usage to the tokens its client received over all sequences, and to itself.

    `draft_tokens`: all that the chunks showed, if `include_draft_tokens` was asked for.
    """
    assert usage.output_tokens == num_output_tokens, "usage counts other tokens than were received"
    assert usage.accepted_tokens <= usage.draft_tokens, "more accepted than drafted"
    assert usage.accepted_tokens <= usage.output_tokens, "more accepted than came out"
    positions = usage.acceptance_by_position
    assert sum(entry.drafted for entry in positions) == usage.draft_tokens
    assert sum(entry.accepted for entry in positions) == usage.accepted_tokens
    assert all(entry.accepted <= entry.drafted <= usage.rounds for entry in positions)
    # A token is drafted, and accepted, only behind those before it.
    assert [entry.drafted for entry in positions] == sorted((entry.drafted for entry in positions), reverse=True)
    assert [entry.accepted for entry in positions] == sorted((entry.accepted for entry in positions), reverse=True)
    if draft_tokens:
        origins = [token.origin for token in draft_tokens]
        accepted = origins.count(inference_pb2.TOKEN_ORIGIN_ACCEPTED)
        rejected = origins.count(inference_pb2.TOKEN_ORIGIN_REJECTED)
        assert accepted == usage.accepted_tokens, "other tokens are shown as accepted than usage counts"
        assert accepted + rejected == usage.draft_tokens, "other tokens are shown as drafted than usage counts"
        assert len(origins) - rejected == num_output_tokens, "other tokens are shown than were received"

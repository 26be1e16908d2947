"""What must hold of the usage behind any stream, whatever was asked for and whatever failed on the way."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.v1 import inference_pb2


def check_usage(
    usage: inference_pb2.Usage,
    num_output_tokens: int,
    draft_tokens: Sequence[inference_pb2.DraftToken] = (),
    in_chains: bool = False,
) -> None:
    """Holds a request's usage to the tokens its client received over all sequences, and to itself.

    `draft_tokens`: all that the chunks showed, if `include_draft_tokens` was asked for. `in_chains`: whether all
    drafts were such. In trees several tokens stand at one position, and no more of them are shown than might have been
    the next.
    """
    assert usage.output_tokens == num_output_tokens, "usage counts other tokens than were received"
    assert usage.accepted_tokens <= usage.draft_tokens, "more accepted than drafted"
    assert usage.accepted_tokens <= usage.output_tokens, "more accepted than came out"
    positions = usage.acceptance_by_position
    num_drafted = sum(entry.drafted for entry in positions)
    assert num_drafted == usage.draft_tokens if in_chains else num_drafted <= usage.draft_tokens
    assert sum(entry.accepted for entry in positions) == usage.accepted_tokens
    assert all(entry.accepted <= entry.drafted <= usage.rounds for entry in positions)
    # Every round is somebody's, or several's, and drafts are shown as theirs.
    assert max((its.rounds for its in usage.by_source), default=0) <= usage.rounds
    assert usage.rounds <= sum(its.rounds for its in usage.by_source)
    assert sum(its.draft_tokens for its in usage.by_source) == usage.draft_tokens
    assert sum(its.accepted_tokens for its in usage.by_source) == usage.accepted_tokens
    assert inference_pb2.DRAFT_SOURCE_UNSPECIFIED not in {its.source for its in usage.by_source}
    # A token is drafted, and accepted, only behind those before it.
    assert [entry.drafted for entry in positions] == sorted((entry.drafted for entry in positions), reverse=True)
    assert [entry.accepted for entry in positions] == sorted((entry.accepted for entry in positions), reverse=True)
    if draft_tokens:
        origins = [token.origin for token in draft_tokens]
        accepted = origins.count(inference_pb2.TOKEN_ORIGIN_ACCEPTED)
        rejected = origins.count(inference_pb2.TOKEN_ORIGIN_REJECTED)
        assert accepted == usage.accepted_tokens, "other tokens are shown as accepted than usage counts"
        for token in draft_tokens:
            drafted = token.origin in (inference_pb2.TOKEN_ORIGIN_ACCEPTED, inference_pb2.TOKEN_ORIGIN_REJECTED)
            assert (token.source != inference_pb2.DRAFT_SOURCE_UNSPECIFIED) == drafted, "whose a token is"
        shown = accepted + rejected
        as_told = shown == usage.draft_tokens if in_chains else shown <= usage.draft_tokens
        assert as_told, "other tokens are shown as drafted than usage counts"
        assert len(origins) - rejected == num_output_tokens, "other tokens are shown than were received"

"""What speculation did to a text, for the terminal: coloured tokens as in Leviathan et al. 2023, figure 1."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from outrider.v1 import inference_pb2
from rich.text import Text

from shared.worker.draft_sources import SOURCE_NAMES

STYLES = {
    inference_pb2.TOKEN_ORIGIN_ACCEPTED: "green",
    inference_pb2.TOKEN_ORIGIN_REJECTED: "red strike",
    inference_pb2.TOKEN_ORIGIN_RECOVERED: "blue",
    inference_pb2.TOKEN_ORIGIN_BONUS: "cyan",
    inference_pb2.TOKEN_ORIGIN_TARGET: "dim",
}
SOURCE_STYLES = {
    inference_pb2.DRAFT_SOURCE_SUFFIX: ("yellow", "copied and accepted"),
    inference_pb2.DRAFT_SOURCE_TARGET: ("magenta", "drafted by the target itself and accepted"),
}
"""Of accepted tokens that no draft model drafted, and what that means."""

MARKS = {
    inference_pb2.TOKEN_ORIGIN_REJECTED: ("[-", "-]"),
    inference_pb2.TOKEN_ORIGIN_RECOVERED: ("{+", "+}"),
    inference_pb2.TOKEN_ORIGIN_BONUS: ("{*", "*}"),
}
"""What stands around a token where there are no colours."""

_MEANINGS = {
    inference_pb2.TOKEN_ORIGIN_ACCEPTED: "drafted and accepted",
    inference_pb2.TOKEN_ORIGIN_REJECTED: "drafted and rejected",
    inference_pb2.TOKEN_ORIGIN_RECOVERED: "recovered by the target",
    inference_pb2.TOKEN_ORIGIN_BONUS: "bonus of the target",
}
_NOT_DRAFTED = "not drafted"


def render_tokens(tokens: Iterable[inference_pb2.DraftToken], *, colours: bool) -> Text:
    """A round's tokens in text order, each in the colour of its origin, or if accepted of its source; between its
    marks without `colours`."""
    text = Text()
    for (origin, source), run in groupby(tokens, key=lambda token: (token.origin, token.source)):
        shown = "".join(token.text for token in run)
        if origin == inference_pb2.TOKEN_ORIGIN_REJECTED:
            # A rejected line break is not part of the output and must not break its line.
            shown = shown.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
        if colours and origin == inference_pb2.TOKEN_ORIGIN_ACCEPTED and source in SOURCE_STYLES:
            text.append(shown, style=SOURCE_STYLES[source][0])
        else:
            text.append_text(_styled(shown, origin, colours))
    return text


def legend(*, colours: bool) -> Text:
    """What the colours, or marks, mean."""
    meanings = dict(_MEANINGS)
    accepted = [Text(meaning, style) for style, meaning in SOURCE_STYLES.values() if colours]
    if colours:
        meanings[inference_pb2.TOKEN_ORIGIN_TARGET] = _NOT_DRAFTED
    else:
        # Decoded plainly, tokens come one by one: marks around each of them could not be read.
        meanings[inference_pb2.TOKEN_ORIGIN_ACCEPTED] += f", or {_NOT_DRAFTED}"
    first, *others = (_styled(meaning, origin, colours) for origin, meaning in meanings.items())
    return Text(" · ").join([first, *accepted, *others])


def summary(usage: inference_pb2.Usage) -> str:
    """One line: TTFT, tokens/s, α, tokens per round, prefix hit."""
    seconds = usage.total_seconds
    parts = [f"TTFT {usage.time_to_first_token_seconds * 1000:.0f} ms"]
    rate = f"{usage.output_tokens / seconds:.1f}" if seconds > 0 else "-"
    parts.append(f"{rate} tokens/s ({usage.output_tokens} in {seconds:.2f} s)")
    alpha = acceptance_rate(usage)
    if alpha is None:
        parts.append("nothing drafted")
    else:
        parts.append(f"α {alpha:.2f} ({usage.accepted_tokens} of {usage.draft_tokens} draft tokens kept)")
        parts.append(f"{1 + usage.accepted_tokens / max(usage.rounds, 1):.2f} tokens per round")
        by_source = sorted(usage.by_source, key=lambda its: its.source)
        if by_source:
            kept = [f"{its.accepted_tokens} by {SOURCE_NAMES[its.source]}" for its in by_source]
            parts.append("kept " + ", ".join(kept))
    parts.append(f"prefix hit {usage.cached_tokens}/{usage.prompt_tokens}")
    return " · ".join(parts)


def acceptance_rate(usage: inference_pb2.Usage) -> float | None:
    """α: the share of draft tokens kept among those whose turn came (Leviathan et al. 2023, definition 3.1).

    A draft token's turn comes when every draft token before it was kept, so the tokens behind a
    rejection do not count. None if nothing was drafted. Where rounds drafted different numbers of
    tokens, the turns at a position are taken at their most, which can only make α too small.
    """
    turns, turns_here = 0, None
    for position in usage.acceptance_by_position:
        turns += position.drafted if turns_here is None else min(position.drafted, turns_here)
        turns_here = position.accepted
    return sum(position.accepted for position in usage.acceptance_by_position) / turns if turns else None


def _styled(text: str, origin: inference_pb2.TokenOrigin, colours: bool) -> Text:
    if colours:
        return Text(text, style=STYLES.get(origin, ""))
    before, after = MARKS.get(origin, ("", ""))
    return Text(f"{before}{text}{after}")

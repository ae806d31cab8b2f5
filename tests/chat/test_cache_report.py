"""What `/why` and `--why` say, for every way in which a prompt can follow another."""

import pytest

from localllm.answer.completion import Completion, Sample
from localllm.chat.cache_report import CacheKind, report_cache
from localllm.cli.draw.figures import describe_cache

KEPT = "earlier requests to the engine that is kept loaded"
TOKENS = list(range(1000))
OTHER = TOKENS[:200] + [0] * 300


@pytest.mark.parametrize(
    ("earlier", "prompt", "num_cached", "elsewhere", "told"),
    [
        ([], 400, 0, "", "it is the first request to the model by this command"),
        ([], 400, 384, KEPT, f"384 tokens came from {KEPT}"),
        ([], 400, 384, "disk (--cache-disk)", "384 tokens came from disk (--cache-disk)"),
        (TOKENS[:442], 518, 432, "", "it continues all 442 tokens of the previous request"),
        (
            TOKENS[:518],
            442,
            432,
            KEPT,
            "it is the beginning of the previous request, which had 518 tokens",
        ),
        (OTHER, 500, 192, KEPT, "first difference from the previous request: token 200"),
        (OTHER, 500, 480, "", "280 more tokens came from requests before that one"),
        (OTHER, 500, 480, KEPT, f"280 more tokens came from requests before that one, or {KEPT}"),
        (OTHER, 500, 64, "", "136 tokens before that were no longer in the cache"),
    ],
)
def test_the_report_is_true(
    earlier: list[int], prompt: int, num_cached: int, elsewhere: str, told: str
) -> None:
    report = report_cache(
        lambda ids: " ".join(map(str, ids)),
        earlier,
        TOKENS[:prompt],
        [{"role": "user", "content": "text"}],
        num_cached,
        CacheKind(elsewhere=elsewhere),
    )
    lines = describe_cache(report, Completion(prompt, 0.0, [Sample()]))
    assert any(line.strip().startswith(told) for line in lines), lines
    # Nothing is said of a disk or of other processes that had no part in it.
    assert elsewhere in (KEPT, "") or "kept" not in "".join(lines)
    assert elsewhere or not {"disk", "kept loaded"} & set("".join(lines).split())
    assert not any("continues all" in line for line in lines) or prompt >= len(earlier)

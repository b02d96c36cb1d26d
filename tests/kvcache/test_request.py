"""Requests: validation, appending, sessions, who reads the cache (spec kv 1.4, 2)."""

import pytest
import torch

from slotmirror.kvcache.request import MultimodalFeature, PoolingParams, Request, SamplingParams
from support.kv_builders import make_request


def feature(offset, length, identifier="i"):
    return MultimodalFeature(identifier, offset, length)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_token_ids": []}, r"needs a prompt.*lengths \[0\]"),
        ({}, r"needs a prompt.*lengths \[\]"),
        (
            {"prompt_token_ids": [1, 2], "prompt_embeds": torch.zeros(3, 1)},
            r"needs a prompt.*lengths \[2, 3\]",
        ),
        (
            {"prompt_token_ids": range(9), "mm_features": [feature(4, 2), feature(0, 2)]},
            r"sorted by offset and not overlap, but 'i' starts at 0 before 'i' ends at 6",
        ),
        (
            {"prompt_token_ids": range(9), "mm_features": [feature(0, 4), feature(3, 2)]},
            r"sorted by offset and not overlap",
        ),
        (
            {"prompt_token_ids": range(9), "mm_features": [feature(8, 2)]},
            r"'i' ends at 10, after the prompt's 9 tokens",
        ),
    ],
)
def test_bad_prompts_are_refused(options, message):
    """The error names the request, the value and what is expected."""
    with pytest.raises(ValueError, match=r"request 'r'.*" + message):
        Request("r", **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: feature(-1, 2), "offset=-1"),
        (lambda: feature(0, 0), "length=0"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens must be >= 1, got 0"),
        (lambda: SamplingParams(max_tokens=2, min_tokens=3), "max_tokens=2, got 3"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    """Features and sampling parameters check themselves."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "skips"),
    [
        ({}, False),
        ({"sampling_params": SamplingParams(prompt_logprobs=0)}, True),
        (
            {"sampling_params": SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)},
            False,
        ),
        ({"sampling_params": SamplingParams(skip_reading_prefix_cache=True)}, True),
        ({"pooling_params": PoolingParams("embed")}, False),
        ({"pooling_params": PoolingParams("token_embed")}, True),
        ({"pooling_params": PoolingParams("token_classify")}, True),
        ({"pooling_params": PoolingParams("plugin")}, True),
        ({"pooling_params": PoolingParams("token_embed", skip_reading_prefix_cache=False)}, False),
    ],
)
def test_who_skips_reading_the_cache(options, skips):
    """The explicit wish, else whether every prompt token's output is asked for."""
    assert Request("r", [1], **options).skip_reading_prefix_cache is skips


def test_token_views():
    """Prompt and output are parts of one list; a prompt of embeddings has no ids."""
    request = Request("r", [1, 2])
    request.append_output_token_ids(3)
    request.append_output_token_ids([4, 5])
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2], [3, 4, 5])
    assert request.num_output_tokens == 3
    assert Request("e", prompt_embeds=torch.zeros(2, 1)).prompt_token_ids is None


def test_the_callers_list_is_not_kept():
    """Later changes to the list that was passed do not reach the request."""
    tokens = [1, 2]
    request = Request("r", tokens)
    tokens.append(3)
    assert request.all_token_ids == [1, 2]


def test_priority_order():
    """Smaller priority first, then earlier arrival, then the id."""
    requests = [
        Request("b", [1], priority=1, arrival_time=1.0),
        Request("a", [1], priority=1, arrival_time=1.0),
        Request("c", [1], priority=1, arrival_time=0.5),
        Request("d", [1], priority=0, arrival_time=9.0),
    ]
    assert [request.request_id for request in sorted(requests)] == ["d", "c", "a", "b"]


@pytest.mark.parametrize("issue", ["49377", "49449"])
def test_issue_session_drops_the_hash_of_a_dropped_token(issue):
    """A sampled token that completed a block but was never computed goes, with the hash (X2)."""
    session = make_request("s", range(6))
    session.append_output_token_ids([6, 7])
    session.num_computed_tokens = 7
    assert len(session.block_hashes) == 2
    session.continue_session([50, 51])
    fresh = make_request("f", [*range(7), 50, 51])
    assert session.all_token_ids == fresh.all_token_ids
    assert session.block_hashes == fresh.block_hashes
    assert session.num_output_tokens == 0


def test_session_keeps_hashes_of_what_was_computed():
    """Whole computed blocks keep their hashes, and new features count from the new tokens."""
    session = make_request("s", range(8), mm_features=[feature(2, 3)])
    session.append_output_token_ids(8)
    session.num_computed_tokens = 8
    session.continue_session(range(20, 26), [feature(1, 2, "j")])
    fresh = make_request(
        "f", [*range(8), *range(20, 26)], mm_features=[feature(2, 3), feature(9, 2, "j")]
    )
    assert session.block_hashes == fresh.block_hashes
    assert session.prompt_token_ids == fresh.prompt_token_ids


def test_session_ignores_drafts_computed_past_its_end():
    """Accepted drafts after the token that ended a turn are computed, but not part of it."""
    session = make_request("s", range(6))
    session.append_output_token_ids([6])
    session.num_computed_tokens = 9
    session.continue_session([50])
    assert session.all_token_ids == [*range(7), 50]
    assert session.num_computed_tokens == 7


@pytest.mark.parametrize(
    ("options", "turn", "message"),
    [
        ({"prompt_token_ids": range(6)}, [feature(0, 3)], "'i' ends at 9, after the prompt's 8"),
        ({"prompt_embeds": torch.zeros(6, 1)}, (), "cannot go on after a prompt of embeddings"),
    ],
)
def test_bad_turns_change_nothing(options, turn, message):
    """A turn that is refused leaves the session as it was."""
    session = Request("s", **options)
    session.append_output_token_ids([1])
    session.num_computed_tokens = 6
    before = session.all_token_ids.copy()
    with pytest.raises(ValueError, match=message):
        session.continue_session([7, 8], turn)
    assert session.all_token_ids == before
    assert (session.num_prompt_tokens, session.mm_features) == (6, [])

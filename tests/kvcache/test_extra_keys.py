"""Which requests may share a block, and which never (spec kv 1.3, scenarios 1-11)."""

import pickle

import pytest
import torch

from slotmirror.kvcache.extra_keys import generate_block_hash_extra_keys
from slotmirror.kvcache.hash_functions import HASH_FUNCTIONS, KeyFormat, init_start_value
from slotmirror.kvcache.request import LoRARequest, MultimodalFeature, Request
from support.kv_builders import make_hasher, make_request

PROMPT = range(16)


def hashes(tokens=PROMPT, **options):
    return make_request("r", tokens, **options).block_hashes


def extra_keys(request, block, key_format=KeyFormat.TAGGED, size=4):
    return generate_block_hash_extra_keys(request, block * size, (block + 1) * size, key_format)


def test_plain_blocks_have_no_keys():
    """Nothing applicable is None, not an empty tuple; an empty salt is no salt."""
    request = make_request("r", PROMPT, cache_salt="")
    assert extra_keys(request, 0) is None
    assert extra_keys(request, 0, KeyFormat.V0_25) is None


def test_order_is_adapter_items_salt():
    """Adapter, items by offset, salt; the salt is in the first block only, the adapter in all."""
    request = make_request(
        "r",
        PROMPT,
        lora_request=LoRARequest("L", "/l"),
        cache_salt="S",
        mm_features=[MultimodalFeature("A", 1, 2), MultimodalFeature("B", 3, 4)],
    )
    assert extra_keys(request, 0) == (
        ("lora", "L", "/l"),
        ("mm", "A", 1),
        ("mm", "B", 3),
        ("cache_salt", "S"),
    )
    assert extra_keys(request, 1) == (("lora", "L", "/l"), ("mm", "B", -1))
    assert extra_keys(request, 0, KeyFormat.V0_25) == ("L", ("A", 1), ("B", 3), "S")
    assert extra_keys(request, 3) == (("lora", "L", "/l"),)


def test_issue_44701_adapter_name_is_no_salt():
    """A base request with salt "abc" shares nothing with adapter "abc", as 0.25.1 did (X3)."""
    adapter = {"lora_request": LoRARequest("abc", "/abc")}
    assert hashes(**adapter)[0] != hashes(cache_salt="abc")[0]
    old = make_hasher(key_format=KeyFormat.V0_25)
    assert hashes(**adapter, block_hasher=old)[0] == hashes(cache_salt="abc", block_hasher=old)[0]


def test_issue_30931_adapter_path_counts():
    """Two adapters under one name but with other paths never share (X4)."""
    one = hashes(lora_request=LoRARequest("n", "/one", adapter_id=1))
    two = hashes(lora_request=LoRARequest("n", "/two", adapter_id=2))
    assert not set(one) & set(two)


def test_issue_42125_reloaded_adapter_is_another():
    """An in-place reload shares nothing with before; version 0 has no fourth element (X4)."""
    before = make_request("r", PROMPT, lora_request=LoRARequest("n", "/p"))
    after = make_request("r", PROMPT, lora_request=LoRARequest("n", "/p", version=1))
    assert extra_keys(before, 0) == (("lora", "n", "/p"),)
    assert extra_keys(after, 0) == (("lora", "n", "/p", 1),)
    assert not set(before.block_hashes) & set(after.block_hashes)


def test_issue_3264_adapter_and_base_model_do_not_share():
    """Neither hits the other's blocks; each hits its own."""
    adapter = {"lora_request": LoRARequest("n", "/p")}
    assert not set(hashes()) & set(hashes(**adapter))
    assert hashes(**adapter) == hashes(**adapter)


def test_issue_27211_adapter_ids_do_not_count():
    """Engines that loaded adapters in another order, hence with other ids, agree."""
    assert hashes(lora_request=LoRARequest("n", "/p", adapter_id=1)) == hashes(
        lora_request=LoRARequest("n", "/p", adapter_id=9)
    )


def test_issue_20261_images_separate_their_blocks_only():
    """Blocks that overlap different images differ, and all after them; text before is shared."""
    one, two = (hashes(mm_features=[MultimodalFeature(i, 6, 4)]) for i in ("one", "two"))
    assert one[0] == two[0]
    assert all(a != b for a, b in zip(one[1:], two[1:], strict=True))


def test_issue_36708_the_offset_counts():
    """One image at two offsets in otherwise equal placeholder tokens."""
    tokens = [5] * 8
    one, two = (hashes(tokens, mm_features=[MultimodalFeature("i", at, 3)]) for at in (0, 1))
    assert one[0] != two[0]


@pytest.mark.parametrize("issue", ["53156", "51694"])
def test_issue_incremental_hashing_equals_hashing_from_scratch(issue):
    """A block that overlaps two images and is completed by outputs has both in its hash."""
    features = [MultimodalFeature("one", 8, 1), MultimodalFeature("two", 9, 1)]
    grown = make_request("r", range(10), mm_features=features)
    grown.append_output_token_ids([10, 11])
    whole = make_request("r", range(12), mm_features=features)
    assert grown.block_hashes == whole.block_hashes


def test_v0_25_resumes_with_the_last_image_only():
    """Format `v0_25` keeps the rule of 0.25.1 byte for byte: earlier images are forgotten."""
    old = make_hasher(key_format=KeyFormat.V0_25)
    features = [MultimodalFeature("one", 8, 1), MultimodalFeature("two", 9, 1)]
    grown = make_request("r", range(10), mm_features=features, block_hasher=old)
    grown.append_output_token_ids([10, 11])
    last_only = make_request("r", range(12), mm_features=features[1:], block_hasher=old)
    assert grown.block_hashes == last_only.block_hashes


def test_issue_56655_the_mask_of_mixed_prompts_counts():
    """Equal ids and embeddings under another is-token mask are another prompt."""
    embeds = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    masks = ([True] * 8, [True] * 7 + [False])
    one, two = (hashes(range(8), prompt_embeds=embeds, prompt_is_token_ids=mask) for mask in masks)
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_prompt_embeds_are_told_apart():
    """Embeddings have token id 0 everywhere: their bytes make the difference, also in bf16."""
    rows = torch.zeros(8, 4, dtype=torch.bfloat16)
    other = rows.clone()
    other[7, 3] = 1
    one, two = (Request("r", prompt_embeds=e, block_hasher=make_hasher()) for e in (rows, other))
    assert one.all_token_ids == [0] * 8
    assert one.block_hashes[0] == two.block_hashes[0]
    assert one.block_hashes[1] != two.block_hashes[1]


@pytest.mark.parametrize("issue", ["17045", "16016", "53347"])
def test_issue_only_equal_salts_share(issue):
    """Requests with salts s1, s2 and none share nothing; equal salts share everything."""
    one, two, none = hashes(cache_salt="s1"), hashes(cache_salt="s2"), hashes()
    assert not set(one) & set(two)
    assert not set(one) & set(none)
    assert hashes(cache_salt="s1") == one


@pytest.mark.parametrize("algo", ["sha256", "xxhash"])
@pytest.mark.parametrize("name", ["image-1", "i", "é", "漢", "漢字", "x" * 300, ""])
def test_equal_strings_hash_equally_whichever_objects_they_are(algo, name):
    """Pickle looks at object identity; our tags do not depend on it (X6).

    The same image twice in a block, under one string object and under two equal ones.
    """
    hasher = make_hasher(algo=algo)
    copies = [(name + "?")[:-1] for _ in range(2)]
    results = {
        tuple(
            hashes(
                mm_features=[MultimodalFeature(a, 0, 1), MultimodalFeature(b, 2, 1)],
                cache_salt=salt,
                block_hasher=hasher,
            )
        )
        for a, b, salt in ((name, name, name), (*copies, name), (copies[0], name, copies[1]))
    }
    assert len(results) == 1


def test_identity_matters_to_plain_pickle():
    """The trap that X6 avoids is real: one object twice pickles differently from two equal ones."""
    name = "image-1"
    copy = (name + "?")[:-1]
    assert pickle.dumps((name, name), 5) != pickle.dumps((name, copy), 5)


@pytest.mark.parametrize("algo", HASH_FUNCTIONS)
def test_long_strings_and_three_token_blocks(algo):
    """Strings of 256 bytes and more and tuples of three use other pickle opcodes."""
    start_value = init_start_value(algo, KeyFormat.TAGGED, {"PYTHONHASHSEED": "0"})
    hasher = make_hasher(3, algo)
    salted = [hashes(cache_salt="s" * length, block_hasher=hasher) for length in (255, 256, 257)]
    assert len({tuple(h) for h in salted}) == 3
    first = (start_value, (0, 1, 2), (("cache_salt", "s" * 256),))
    assert salted[1][0] == HASH_FUNCTIONS[algo](first)

"""What enters a block's hash besides its tokens: adapter, multimodal items, salt, embeddings.

Order inside the tuple: adapter, multimodal items by offset, salt (first block only), embeddings
(spec kv 1.3). Nothing applicable is None, never an empty tuple.
"""

from bisect import bisect_right
from operator import attrgetter

from slotmirror.kvcache.hash_functions import KeyFormat
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.request_params import LoRARequest, MultimodalFeature

ExtraKeys = tuple[object, ...] | None

_feature_end = attrgetter("end")


def needs_extra_keys(request: Request) -> bool:
    """Whether any block of the request may have extra keys."""
    return (
        bool(request.mm_features or request.cache_salt)
        or request.lora_request is not None
        or request.prompt_embeds is not None
    )


def generate_block_hash_extra_keys(
    request: Request, start: int, end: int, key_format: KeyFormat, first_feature: int = 0
) -> ExtraKeys:
    """The extra keys of the block of tokens [start, end), None if it has none.

    Features before index `first_feature` are left out: format `V0_25` considers only the last
    one once the prompt is behind it (`resume_feature_index`).
    """
    features = request.mm_features
    overlapping: list[MultimodalFeature] = []
    if features and features[-1].end > start:
        index = max(bisect_right(features, start, key=_feature_end), first_feature)
        while index < len(features) and features[index].offset < end:
            overlapping.append(features[index])
            index += 1
    if key_format is KeyFormat.TAGGED:
        keys = _tagged(request, start, end, overlapping)
    else:
        keys = _untagged(request, start, end, overlapping)
    return tuple(keys) or None


def resume_feature_index(request: Request, start: int, key_format: KeyFormat) -> int:
    """First feature that hashing may consider when it resumes at token `start`.

    0.25.1 considers only the last feature then, although earlier ones may overlap the block too;
    the tagged format looks at all, so that incremental hashing equals hashing from scratch
    (public issues 53156, 51694).
    """
    if start > 0 and key_format is KeyFormat.V0_25:
        return max(len(request.mm_features) - 1, 0)
    return 0


def _untagged(
    request: Request, start: int, end: int, features: list[MultimodalFeature]
) -> list[object]:
    keys: list[object] = []
    if request.lora_request is not None:
        keys.append(request.lora_request.name)
    keys.extend((feature.identifier, feature.offset - start) for feature in features)
    if start == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        keys.append(request.prompt_embeds_digest(start, end))
    return keys


def _tagged(
    request: Request, start: int, end: int, features: list[MultimodalFeature]
) -> list[object]:
    keys: list[object] = []
    if request.lora_request is not None:
        keys.append(_lora_tag(request.lora_request))
    keys.extend(("mm", _own_object(f.identifier), f.offset - start) for f in features)
    if start == 0 and request.cache_salt:
        keys.append(("cache_salt", _own_object(request.cache_salt)))
    if request.prompt_embeds is not None:
        keys.append(_embeds_tag(request, start, end))
    return keys


def _lora_tag(lora: LoRARequest) -> tuple[object, ...]:
    tag = ("lora", _own_object(lora.name), _own_object(lora.path))
    return (*tag, lora.version) if lora.version else tag


def _embeds_tag(request: Request, start: int, end: int) -> tuple[object, ...]:
    """In mixed mode the mask is part of the identity: equal ids and embeddings under another
    mask are another prompt (public issue 56655)."""
    assert request.prompt_embeds is not None
    tag = ("prompt_embeds", request.prompt_embeds_digest(start, end))
    mask = request.prompt_is_token_ids
    return tag if mask is None else (*tag, bytes(map(bool, mask[start:end])))


def _own_object(text: str) -> str:
    """An equal string that is its own object.

    Pickle writes a second occurrence of one object as a reference, so without this the same
    image twice in a block would hash differently depending on who built the strings.
    """
    return (text + " ")[:-1]

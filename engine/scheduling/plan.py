"""The step that a scheduler is putting together."""

from dataclasses import dataclass, field

from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.request import Request


@dataclass
class StepPlan:
    """What is scheduled so far and what is left of the step's budgets (tokens)."""

    token_budget: int
    encoder_budget: int
    running: list[Request] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, BlockIds] = field(default_factory=dict)
    spec_tokens: dict[str, list[int]] = field(default_factory=dict)
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)

    def add(
        self, request: Request, num_new_tokens: int, blocks: BlockIds, encoder_inputs: list[int]
    ) -> None:
        """Schedule tokens of a request: `blocks` are what the worker is told about it."""
        req_id = request.request_id
        self.num_scheduled_tokens[req_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        self.new_blocks[req_id] = blocks
        for input_id in encoder_inputs:
            self.add_encoder_input(request, input_id)

    def add_encoder_input(self, request: Request, input_id: int) -> None:
        """Have this request's feature encoded in the step."""
        self.encoder_inputs.setdefault(request.request_id, []).append(input_id)
        self.encoder_budget -= request.mm_features[input_id].length

    def cancel(self, request: Request) -> list[int]:
        """Take a preempted request out again; the encoder inputs that it would have computed."""
        req_id = request.request_id
        if req_id in self.num_scheduled_tokens:
            self.running.remove(request)
            self.token_budget += self.num_scheduled_tokens.pop(req_id)
            del self.new_blocks[req_id]
            self.spec_tokens.pop(req_id, None)
        encoder_inputs = self.encoder_inputs.pop(req_id, [])
        self.encoder_budget += sum(request.mm_features[i].length for i in encoder_inputs)
        return encoder_inputs

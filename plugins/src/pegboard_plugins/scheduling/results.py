"""Results: what becomes of the output of a step."""

from __future__ import annotations

from pegboard.contracts.grammar import GrammarStates
from pegboard.contracts.scheduler import RequestStatus
from pegboard.wire import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from pegboard_plugins.scheduling import prompt_logprobs
from pegboard_plugins.scheduling.request import Request
from pegboard_plugins.scheduling.state import SchedulerState


def apply_results(state: SchedulerState, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
    """Book ``output`` of ``plan``: append tokens, publish full blocks, end what has reached its end. One message per request
    that has news. Raises ``RuntimeError`` where plan and output do not belong together."""
    if not plan.slots:
        return []
    step = plan.step_id
    if not state.in_flight or not state.in_flight[0].step_id == step == output.step_id:
        expected = state.in_flight[0].step_id if state.in_flight else None
        raise RuntimeError(f"results must come in the order of the plans: got {output.step_id} for {step}, expected {expected}")
    rows = state.in_flight.popleft().rows
    output = _in_plan_order(plan, output)
    state.processed(step)
    plain = not (output.errors or output.logprobs or output.draft_token_ids or state.special or state.events)
    messages: list[EngineCoreOutput] = []
    add, message_type, ended, row = messages.append, EngineCoreOutput, False, -1
    for request, tokens, num_to_sample, computed, count in zip(
        rows, output.sampled_token_ids, plan.num_to_sample, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
    ):
        row += 1
        if request.first_step > step:
            continue  # preempted or ended after this step was planned
        if plain and num_to_sample == 1 == len(tokens):  # the common case, written out
            token, token_ids = tokens[0], request.token_ids
            token_ids.append(token)
            length = len(token_ids)
            if length < request.max_len and (token not in request.stop_token_ids or length <= request.min_len):
                request.num_placeholders -= 1
                if computed + count >= request.next_commit:
                    state.settle(request, computed + count)
                add(
                    message_type(
                        request_id=request.request_id,
                        new_token_ids=tokens,
                        num_cached_tokens=request.num_cached,
                        num_preemptions=request.num_preemptions,
                    )
                )
                continue
            token_ids.pop()
        message = _apply_row(state, plan, output, row, request)
        if message is not None:
            ended = ended or message.finish_reason is not None
            add(message)
    if ended:
        state.drop_stopped()
    return messages


def _apply_row(
    state: SchedulerState, plan: SchedulerOutput, output: ModelRunnerOutput, row: int, request: Request
) -> EngineCoreOutput | None:
    """Any row: an intermediate chunk, one token, accepted drafts, the last token, an error."""
    message = EngineCoreOutput(
        request_id=request.request_id, num_cached_tokens=request.num_cached, num_preemptions=request.num_preemptions
    )
    if row in output.errors:
        return _end(state, request, message, RequestStatus.FINISHED_ERROR, output.errors[row])
    tokens, num_to_sample = output.sampled_token_ids[row], plan.num_to_sample[row]
    if not min(num_to_sample, 1) <= len(tokens) <= num_to_sample:
        raise RuntimeError(
            f"step {plan.step_id}: the worker returned {len(tokens)} tokens for request {request.request_id!r}, "
            f"planned were {'1 to ' if num_to_sample > 1 else ''}{num_to_sample}"
        )
    rejected = num_to_sample - len(tokens)
    computed, count = plan.num_computed_tokens[row], plan.num_scheduled_tokens[row]
    request.num_placeholders -= num_to_sample
    request.num_computed -= rejected
    request.num_drafts = 0
    if request.lacks_entries:
        prompt_logprobs.collect(request, plan.step_id, computed, count, output.prompt_logprobs.get(row, ()))
    is_first = len(tokens) > 0 and len(request.token_ids) == request.num_prompt
    message.new_token_ids, status = _append(request, tokens)
    state.settle(request, computed + count - rejected)
    reason = request.token_ids[-1] if status is RequestStatus.FINISHED_STOPPED else None
    if tokens and state.grammars is not None and request.wire.grammar is not None:
        problem, status = _advance(state.grammars, request, message.new_token_ids, status)
        if problem is not None:
            message.new_token_ids = []
            return _end(state, request, message, RequestStatus.FINISHED_ERROR, problem)
    message.logprobs = output.logprobs.get(row, [])[: len(message.new_token_ids)]
    if is_first:
        message.prompt_logprobs = prompt_logprobs.report(request)
        if not request.is_special:
            state.special.pop(request.request_id, None)
        state.emit("first_token", request)
    if status is not None:
        return _end(state, request, message, status, reason)
    if tokens and row < len(output.draft_token_ids) and not request.num_placeholders and request.wire.grammar is None:
        request.spec_token_ids = list(output.draft_token_ids[row])
    return message if tokens else None


def _end(
    state: SchedulerState, request: Request, message: EngineCoreOutput, status: RequestStatus, reason: int | str | None
) -> EngineCoreOutput:
    """``message`` is the last one of ``request``."""
    state.end(request, status)
    message.finish_reason, message.stop_reason = status.finish_reason, reason
    return message


def _advance(
    grammars: GrammarStates, request: Request, tokens: list[int], status: RequestStatus | None
) -> tuple[str | None, RequestStatus | None]:
    """Take ``tokens``, after which the request has ``status``, into its grammar; a stop token at their end is not part of its
    language. Why the request cannot go on, or None; and how it ended: also with its grammar, whatever ``min_tokens`` asks."""
    stopped = status is RequestStatus.FINISHED_STOPPED
    accepted = tokens[:-1] if stopped else tokens
    problem = grammars.accept(request.request_id, accepted) if accepted else None
    if problem is None and not stopped and grammars.terminated(request.request_id):
        return None, RequestStatus.FINISHED_STOPPED
    return problem, status


def _append(request: Request, tokens: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Append tokens up to the first that ends the request; what was kept, and how it ended."""
    token_ids = request.token_ids
    for position, token in enumerate(tokens, 1):
        token_ids.append(token)
        if token in request.stop_token_ids and len(token_ids) > request.min_len:
            return tokens[:position], RequestStatus.FINISHED_STOPPED
        if len(token_ids) >= request.max_len:
            return tokens[:position], RequestStatus.FINISHED_LENGTH_CAPPED
    return tokens, None


def _in_plan_order(plan: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
    """A worker may answer in another order of rows than it was asked."""
    if output.slots == plan.slots:
        return output
    row_of = {slot: row for row, slot in enumerate(output.slots)}
    if len(row_of) != len(output.slots) or row_of.keys() != set(plan.slots):
        raise RuntimeError(f"step {plan.step_id}: the worker answered for slots {output.slots}, planned were {plan.slots}")
    order = [row_of[slot] for slot in plan.slots]
    new_row = {old: new for new, old in enumerate(order)}
    return ModelRunnerOutput(
        step_id=output.step_id,
        slots=plan.slots,
        sampled_token_ids=[output.sampled_token_ids[row] for row in order],
        logprobs={new_row[row]: values for row, values in output.logprobs.items()},
        prompt_logprobs={new_row[row]: values for row, values in output.prompt_logprobs.items()},
        errors={new_row[row]: message for row, message in output.errors.items()},
        draft_token_ids=[output.draft_token_ids[row] for row in order] if output.draft_token_ids else [],
        connector_output=output.connector_output,
        ext=output.ext,
    )

"""Hooks of all modules: every call's inputs and outputs, named and put into scopes; the calls that begin steps.

At level launch a layer's inputs (the parameters that it uses, and its grad_output, among them) are left out where they lie on
a GPU: they are no place where a difference counts, and each buffer of each launch that made or reads them is digested
anyway. Outputs and gradients are places where one counts, whatever becomes of it later, so these are recorded at every
level. It is a matter of the level alone, whatever was seen of the launches, so that two runs of one level leave out the
same."""
import itertools
import sys
import threading

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _current_graph_task_id as graph_task, _get_tracing_state as tracing_state
from torch._C._functorch import peek_interpreter_stack as transform
from torch.nn.modules import module as torch_module

from . import _native as native
from . import backward, last_hook, made, names, steps
from .names import EVAL, INPUT, OUTPUT, RECOMPUTE, failed, flatten, flatten_call, layers, limit_once, put
from .steps import Step

is_compiling = torch.compiler.is_compiling
_get_frame = sys._getframe


_threads = itertools.count(1)


class _Thread(threading.local):
    def __init__(self):
        self.stack = []     # a _Call for each module whose forward is open
        self.on = False     # values are recorded in this call of a root
        self.used = set()   # layers whose parameters and buffers were recorded as inputs in it
        self.taken = set()  # see backward.watch
        self.number = next(_threads)


class _Call:
    __slots__ = ("module", "layer", "flags", "recorded", "edges", "oldest", "ops", "held", "caller")

    def __init__(self, module, layer, flags):
        self.module = module
        self.layer = layer
        self.flags = flags
        self.recorded = False
        self.edges = None
        self.oldest = 0
        self.ops = None
        self.held = None    # names of parameters that the module's own pre-hooks may bring in: not recorded yet
        self.caller = None  # the frame that calls these hooks, and forward() behind them


_BEHIND = "parameters as they were before forward(), of modules whose own pre-hooks are older than the recording"
ops_enter = ops_leave = None  # of ops.py, where ops are wanted
_thread = _Thread()


def _keywords(caller):
    """Keyword arguments of the call, which a global pre-hook is not told of: read where torch keeps them."""
    return caller.f_locals.get("kwargs")


def before(module, args):
    if is_compiling():
        return
    try:
        thread = _thread
        stack = thread.stack
        if stack:
            if steps.deep:
                outer = stack[-1]
                if outer.held is not None:
                    settle()
                _enter(thread, stack, module, args, _get_frame(1), layers.get(id(module)), outer)
        elif steps.listening:
            _enter_root(thread, stack, module, args, _get_frame(1))
    except Exception as error:
        failed("a hook before a module", error)


def _enter_root(thread, stack, module, args, caller):
    if not native.active():
        return
    layer = layers.get(id(module)) or names.name_tree(module)
    may_record = _may_record(thread, layer.tree)
    flags = 0
    if graph_task() != -1:
        flags = RECOMPUTE
    elif not is_grad_enabled():
        flags = EVAL
    elif may_record and transform() is None and tracing_state() is None and steps.trains(layer.tree):
        flags = steps.training_forward(layer.tree, module, args, _keywords(caller))
    thread.used.clear()
    thread.on = steps.opened and native.wanted() and may_record
    thread.taken = set()
    if steps.deep:
        _enter(thread, stack, module, args, caller, layer, None, flags)
    else:
        stack.append(_Call(module, layer, flags))


def _may_record(thread, tree):
    """A module that several threads call in one step: which of them comes first is another one in each run, and calls
    are numbered as they come. Those of the thread that steps are recorded; of the first, until one has stepped."""
    serial = steps.serial()[0] + (not Step.is_open or Step.is_over)  # of the step that a call now belongs to
    known = tree.threads
    if known is None or (known[0] != serial and not known[2]):
        tree.threads = [serial, thread.number, False]
        return True
    if known[0] == serial and known[1] == thread.number and not known[2]:
        return True
    if not known[2]:
        known[2] = True
        limit_once("modules that several threads call in one step: only one thread's calls are recorded", tree.label)
    return thread.number == (Step.stepper or known[1])


def _enter(thread, stack, module, args, caller, layer, outer, flags=0):
    if outer is not None:
        flags = RECOMPUTE if graph_task() != -1 else outer.flags
        if layer is None:
            layer = names.name_stray(module, outer.layer)
    call = _Call(module, layer, flags)
    stack.append(call)
    if not thread.on or (outer is not None and outer.layer.name == layer.name and outer.module is not module):
        return  # the second: a wrapper and what it wraps are one layer
    if transform() is not None or tracing_state() is not None:
        limit_once("modules called inside of torch.func transforms or while torch.jit traces", layer.tree.label)
        return
    frame = layer.forward[flags]
    native.push(frame)
    call.recorded = True
    _record_inputs(call, frame, flags, module, args, caller)
    if ops_enter is not None:
        call.ops = ops_enter(layer, flags, module)


def _record_inputs(call, frame, flags, module, args, caller):
    layer, kwargs = call.layer, _keywords(caller)
    parameters = None
    if flags != RECOMPUTE and (module._parameters or module._buffers) and layer not in _thread.used:
        _thread.used.add(layer)
        parameters = {**module._parameters, **module._buffers} if module._buffers else module._parameters
        if module._forward_pre_hooks and module._parameters:
            parameters = _leave_to_hooks(call, module, parameters, caller)
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        inputs = (("input", args[0]),)
        if names.lean and args[0].is_cuda:
            pass
        elif parameters is not None and not names.lean and names.are_plain(parameters):
            unreadable = native.tensors(frame, INPUT, ("input", *parameters), (args[0], *parameters.values()))
            parameters = None
            if unreadable and unreadable[0] == 0:
                names.unread(args[0])
        elif not native.tensor(frame, INPUT, "input", args[0], flags):
            names.unread(args[0])
    else:
        inputs = []
        flatten_call(args, kwargs, "input", inputs)
        for name, tensor in inputs:
            if not (names.lean and tensor.is_cuda):
                put(frame, INPUT, name, tensor, flags)
    if parameters is not None:
        _record_parameters(frame, parameters)
    if is_grad_enabled():
        call.edges = backward.input_edges(inputs)
        call.oldest = backward.sequence_number()


def _leave_to_hooks(call, module, parameters, caller):
    """The module's own pre-hooks run behind ours, and may be what waits for its parameters (an all-gather that overlaps
    with other layers, as of Megatron's optimizer, ZeRO-3 or a prefetch written by hand): before them memory holds
    anything. So these are recorded behind them, see before_forward(). Gives the others: buffers, and shards, which
    are as they are before such a hook gathers them."""
    plain = names.plain
    held = [name for name, parameter in module._parameters.items() if type(parameter) in plain]
    if not held:
        return parameters
    call.held, call.caller = held, caller
    return {name: tensor for name, tensor in parameters.items() if name not in held}


_forward_calls = {}  # code that calls a module's hooks -> place of the call of forward() in it


def _is_in_forward(caller):
    """The module's own pre-hooks have run. Some of them run operators, collectives and other modules themselves."""
    code = caller.f_code
    place = _forward_calls.get(code)
    if place is None:
        import dis

        loads = [(i.offset, i.argval) for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")]
        places = [at for at, what in loads if "forward_call" in (what if isinstance(what, tuple) else (what,))]
        place = _forward_calls[code] = max(places, default=1 << 62)
    return caller.f_lasti > place


def before_forward(module, args):
    """Behind the module's own pre-hooks, right before forward()."""
    if is_compiling():
        return
    try:
        stack = _thread.stack
        if stack and stack[-1].held is not None and stack[-1].module is module:
            _record_held(stack[-1])
    except Exception as error:
        failed("a hook before a module", error)


def settle():
    """For modules whose pre-hooks are older than we are, so that before_forward() is not called. Called before anything is recorded that happens inside of the innermost open layer: its inputs come first."""
    stack = _thread.stack
    if stack and stack[-1].held is not None and _is_in_forward(stack[-1].caller):
        _record_held(stack[-1])


def _record_held(call):
    table = call.module._parameters
    parameters = {name: table[name] for name in call.held if table.get(name) is not None}
    call.held = call.caller = None
    _record_parameters(call.layer.forward[call.flags], parameters, True)


def _record_parameters(frame, parameters, settled=False):
    """And buffers, as the layer uses them: what changed since the optimizer, or anybody, wrote them shows, and is not taken for
    what the layer did with equal inputs. In evaluations too, as of a teacher that no step trains. A shard is what lies in
    memory before the layer's all-gather. What cannot be read is left out here: the records of the step's end say so."""
    if names.lean:
        parameters = {name: p for name, p in parameters.items() if p is not None and not p.is_cuda}
    if not names.are_plain(parameters, settled):
        names.put_held(frame, INPUT, parameters, settled)
    elif parameters:
        native.tensors(frame, INPUT, parameters, parameters.values())


def after(module, args, output):
    if is_compiling():
        return
    try:
        stack = _thread.stack
        if not stack:
            return
        call = stack.pop()
        if call.module is not module:
            if not steps.deep:
                stack.append(call)
                return
            call = _unwind(stack, call, module)
        if call is not None and call.recorded:
            try:
                if call.ops is not None:
                    ops_leave(call.ops, output, call.edges)
                if call.held is not None and (output is not None or _is_in_forward(call.caller)):  # else a hook raised
                    limit_once(_BEHIND)
                    _record_held(call)
                _record_outputs(call, output, stack)
            finally:
                native.pop()
    except Exception as error:
        failed("a hook after a module", error)


def _unwind(stack, call, module):
    """The call of `module`; those above it go: their hooks never ran (KeyboardInterrupt). None: it is not there."""
    above = [call]
    while stack and stack[-1].module is not module:
        above.append(stack.pop())
    if not stack:
        stack.extend(reversed(above))
        return None
    for dropped in above:
        if dropped.ops is not None:
            ops_leave(dropped.ops)
        if dropped.recorded:
            native.pop()
    return stack.pop()


def current():
    """Of the innermost layer whose forward is open on this thread: (name, flags)."""
    stack = _thread.stack
    return (stack[-1].layer.name, stack[-1].flags) if stack else ("", 0)


def thread_number():
    return _thread.number


def forget_open_calls():
    """An optimizer steps on this thread, so no module is running on it, whatever exceptions passed."""
    stack = _thread.stack
    while stack:
        if stack.pop().recorded:
            native.pop()


def _record_outputs(call, output, stack):
    flags = call.flags
    layer = call.layer
    frame = layer.forward[flags]
    if type(output) is Tensor:
        outputs = (("output", output),)
        if not native.tensor(frame, OUTPUT, "output", output, flags):
            names.unread(output)
    elif output is None:
        return
    else:
        outputs = []
        flatten(output, "output", outputs)
        for name, tensor in outputs:
            put(frame, OUTPUT, name, tensor, flags)
    if is_grad_enabled():
        backward.watch(layer, call.edges, outputs, stack[-1].layer if stack else None, call.oldest,
                       _thread.taken)


def install():
    torch_module.register_module_module_registration_hook(names.registered)
    torch_module.register_module_parameter_registration_hook(names.registered_parameter)
    made.install(torch.nn.Module, names.registered, failed)
    ours = {torch_module.register_module_forward_pre_hook(before).id,
            torch_module.register_module_forward_hook(after, always_call=True).id}
    _be_discreet(ours)
    last_hook.install(before_forward)
    steps.current_layer, steps.thread_number, steps.settle = current, thread_number, settle
    return ours


def _be_discreet(ours):
    """torch.compile warns of global hooks; ours do nothing then, and the warning would be new to the host."""
    original = getattr(torch_module, "_has_any_global_hook", None)
    if original is None:
        return

    def has_any_global_hook():
        tables = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks,
                  torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks)
        return any(key not in ours for table in tables for key in table)

    torch_module._has_any_global_hook = has_any_global_hook


def uninstall(ours):
    last_hook.uninstall()
    for table in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks,
                  torch_module._global_forward_hooks_always_called):
        for key in ours:
            table.pop(key, None)

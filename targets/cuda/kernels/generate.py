"""TVM turns a kernel into CUDA text and launch data; no GPU is needed.

TVM 0.27 sorts the parameters of a kernel by rules of its own, and common subexpressions of sizes may become parameters.  Both
are read from the call that it generates for the host, and leave as names and expressions (pack.py).
"""

import builtins
import inspect
import os
import pickle
import re
from functools import lru_cache

# The text must not depend on whether the machine that generates it has a GPU.
os.environ.setdefault("TVM_COMPILE_FORCE_FALLBACK", "1")

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.parser.core import diagnostics, doc, evaluator
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.parser import ScriptMacro
from tvm.target import Target
from tvm.tirx import compilation_pipeline
from tvm.tirx.build import codegen_build, split_host_device_mods

from edgeq.targets.cuda.arguments import RECORDS
from edgeq.targets.cuda.arguments.record import check_parameters
from edgeq.targets.cuda.kernels import FUNCTIONS, RESIDENT, rolled
from edgeq.targets.cuda.supply.pack import POINTER, Expression, Generated, Parameter, Variant

ARCH = "sm_80"
"""The oldest that is supported: the text uses nothing newer, and serves all."""
BINARY = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "FloorMod": "%",
    "Div": "//",
    "Mod": "%",
    "Min": "min",
    "Max": "max",
}
PREAMBLE_END = "#define ushort unsigned short\n#endif\n"
DEVICE_KERNEL = 2  # tvm::CallingConv::kDeviceKernelLaunch
LOOPS = {"tirx.UnrollLoop": {"explicit_unroll": False}}
"""T.unroll becomes a loop after `#pragma unroll`."""


def parser_of(macro: ScriptMacro):
    """The parser that expands an inline function: that of the innermost frame whose globals have one."""
    frame = inspect.currentframe()
    while frame is not None:
        if (parser := frame.f_globals.get(macro.parser_object_name)) is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError(f"{macro.parser_object_name} not available")


# TVM 0.27 asks inspect.getouterframes instead, which looks for the source of every frame in every loaded module, whenever an
# inline function is called: two thirds of the time of a kernel beside torch and transformers.
ScriptMacro._find_parser_def = parser_of


NESTED = re.compile(r"^\s+@", re.M)
"""A decorated function within another one: the parser takes its decorator away and moves its lines when it visits it."""
parsed_once = lru_cache(maxsize=1024)(doc.parse)
block_once = lru_cache(maxsize=1024)(diagnostics.getsourcelines)


@lru_cache(maxsize=64)
def pickled(source: str) -> bytes:
    return pickle.dumps(doc.parse(source))


def tree_of(source: Source):
    return pickle.loads(pickled(source.source)) if NESTED.search(source.source) else parsed_once(source.source)


# TVM reads the text of an inline function again at each of its calls, and that of a kernel for each of its variants.
Source.as_ast = tree_of
diagnostics.getsourcelines = lambda function: block_once(inspect.unwrap(function).__code__)


def visited(self: evaluator.ExprEvaluator, node):
    """TVM notes where each part of an expression stands, this the statement that it is of."""
    if isinstance(node, list | tuple):
        return type(node)(self._visit_node(each) for each in node)
    return self._visit_node(node)


evaluator.ExprEvaluator._visit = visited

compiled_expression = evaluator._eval_expr
CALLED = "__edgeq_function", "__edgeq_arguments", "__edgeq_named"
CALL = compile("{}(*{}, **{})".format(*CALLED), "<call>", "eval")


def value_of(node, values):
    """What an expression is: by itself where that is a look-up, else as Python compiles it.

    `parser_of` finds `values` as the globals of the frame that makes a call.
    """
    kind = type(node)
    if kind is doc.Name:
        return values[node.id] if node.id in values else getattr(builtins, node.id)
    if kind is doc.Constant:
        return node.value
    if kind is doc.Attribute:
        return getattr(value_of(node.value, values), node.attr)
    if kind is doc.Subscript:
        return value_of(node.value, values)[value_of(node.slice, values)]
    if kind is doc.Tuple and not any(isinstance(each, doc.Starred) for each in node.elts):
        return tuple(value_of(each, values) for each in node.elts)
    plain = kind is doc.Call and not any(isinstance(each, doc.Starred) for each in node.args)
    if plain and all(each.arg for each in node.keywords):
        arguments = [value_of(each, values) for each in node.args]
        named = {each.arg: value_of(each.value, values) for each in node.keywords}
        values |= zip(CALLED, (value_of(node.func, values), arguments, named), strict=True)
        return eval(CALL, values)
    return compiled_expression(node, values)


# TVM has Python compile every name, every attribute and every index by itself.
evaluator._eval_expr = value_of


def generate(variant: Variant) -> Generated:
    """The kernel of a variant.

    KeyError: there is no such kernel.  TypeError: it has parameters that its record (arguments/) does not have.
    """
    function = FUNCTIONS[variant.kernel](*variant.literals).with_attr("global_symbol", variant.symbol)
    check_parameters(RECORDS[variant.kernel], variant.kernel, declared(function))
    target = Target({"kind": "cuda", "arch": ARCH, "max_shared_memory_per_block": 49152, "max_threads_per_block": 1024,
                     "thread_warp_size": 32}, host="llvm")  # fmt: skip
    module = tvm.IRModule({variant.symbol: function})
    with target, tvm.transform.PassContext(opt_level=3, config=LOOPS if rolled(variant.kernel, variant.literals) else None):
        pipeline, _, finish = compilation_pipeline.get_tir_pipeline("tirx")
        host, devices = split_host_device_mods(pipeline(tirx.transform.BindTarget(target)(module)))
        ((device_target, device),) = devices.items()
        ((_, kernel),) = [(g, f) for g, f in device.functions_items() if int(f.attrs.get("calling_conv", 0)) == DEVICE_KERNEL]
        name = str(kernel.attrs["global_symbol"])
        call, bound = host_call(host, name)
        text = codegen_build(finish()(device), device_target).inspect_source()
    values = list(call.args)[1:]
    arguments, extents = values[: len(kernel.params)], values[len(kernel.params) :]
    sizes = dict(zip([str(tag) for tag in kernel.attrs["tirx.kernel_launch_params"]], extents, strict=True))
    scalars = {p.name for p in function.params}
    parameters = [
        Parameter(POINTER, re.sub(r"_ptr(_\d+)?$", "", p.name)) if is_pointer(p) else
        Parameter(str(p.ty.dtype), expression(value, bound, scalars))
        for p, value in zip(kernel.params, arguments, strict=True)
    ]  # fmt: skip

    def extent(kind: str) -> tuple[Expression, ...]:
        return tuple(expression(sizes.get(f"{kind}.{axis}", 1), bound, scalars) for axis in "xyz")

    body = text[text.index(PREAMBLE_END) + len(PREAMBLE_END) :]
    if variant.kernel in RESIDENT:
        body = re.sub(r"__launch_bounds__\((\d+)\)", rf"__launch_bounds__(\1, {RESIDENT[variant.kernel]})", body)
    return Generated(variant, name, body, tuple(parameters), extent("blockIdx"), extent("threadIdx"))


def declared(function):
    """Names and types of the parameters of a kernel, as records have them."""
    return {p.name: POINTER if type(p.ty).__name__ == "BufferType" else str(p.ty.dtype) for p in function.params}


def host_call(host, name):
    """The host's call of a kernel, and the expressions that the host binds to names."""
    calls, bound = [], {}
    for _, function in host.functions_items():

        def visit(node):
            if node.args and getattr(node.args[0], "value", None) == name:
                calls.append(node)

        def bind(node):
            bound[node.var.name] = node.value

        tvm_ffi.structural_walk(function.body, (tvm.ir.Call, visit), order="post")
        tvm_ffi.structural_walk(function.body, (tirx.Bind, bind), order="post")
    (call,) = calls
    return call, bound


def is_pointer(parameter) -> bool:
    return type(parameter.ty).__name__ == "PointerType"


def expression(node, bound, scalars) -> Expression:
    """An expression of TVM as data.  `scalars` stay names; other names are replaced by what the host binds to them."""
    if isinstance(node, int):
        return node
    kind = type(node).__name__
    if kind == "IntImm":
        return int(node.value)
    if kind == "Var":
        return node.name if node.name in scalars else expression(bound[node.name], bound, scalars)
    if kind == "Cast":
        return expression(node.value, bound, scalars)
    if kind in BINARY:
        return [BINARY[kind], expression(node.a, bound, scalars), expression(node.b, bound, scalars)]
    if kind == "Call":
        name, operands = node.op.name, [expression(a, bound, scalars) for a in node.args]
        if name == "tirx.shift_right":
            return ["//", operands[0], 1 << operands[1]]
        if name == "tirx.shift_left":
            return ["*", operands[0], 1 << operands[1]]
        if name == "tirx.bitwise_and" and (operands[1] + 1).bit_count() == 1:
            return ["%", operands[0], operands[1] + 1]
        if name == "tirx.tvm_thread_invariant":
            return operands[0]
    raise NotImplementedError(f"{kind} in the launch of a kernel: {node}")

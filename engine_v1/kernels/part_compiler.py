"""How functions that only kernels call are compiled: to LLVM's intermediate form, and no further.

Numba compiles every function by itself to machine code, with all that it calls inlined into it, before its caller is
compiled in the same way: a kernel of six levels of functions goes through LLVM's optimiser and code generator six
times. Of a kernel part nothing is wanted but what its callers inline, so the kernel alone goes through them.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, _LowerResult
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The intermediate form of a function and of what it calls."""

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        """Lower the function and make it known to its callers."""
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        # By its entry point, an object of its own, callers find a function. This one raises whatever Python gives it.
        entry = set[None]().remove
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state["cr"] = _LowerResult(lowered.fndesc, lowered.call_helper, cfunc=entry, env=lowered.env)
        return True


class PartCompiler(Compiler):  # type: ignore[misc]
    """Numba's own compiler, but for the last step."""

    def define_pipelines(self) -> list[Any]:
        """Return Numba's passes with the last step replaced."""
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (_PartLowering, text) if p is NativeLowering else (p, text) for p, text in pipeline.passes
            ]
            pipeline.finalize()
        return list(pipelines)

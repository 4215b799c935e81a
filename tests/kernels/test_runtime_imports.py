"""A worker without compilers (C21, C27): nothing of the compiler's package is imported, nothing is written, nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kernels.catalog import MINIMAX_H3

ROOT = Path(__file__).parents[2]

# Runs in a bare process: triton cannot be imported, no program can be started, every operator is called once.
PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Refuse())

def audit(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        raise AssertionError(f"started {arguments}")

import json
import torch
sys.addaudithook(audit)
from pathlib import Path
from kernels.cubin import load_kernels
from kernels.cubin_index import for_architecture, read_index
from kernels.ops import Operators
from tests.kernels.test_cubin import RecordingDriver

class Driver(RecordingDriver):
    device_type = "cpu"
    def launch(self, *arguments):
        self.launches.append(arguments[0][1])

driver = Driver()
folder = Path(sys.argv[1])
kernels = load_kernels(folder, for_architecture(read_index(folder), "sm_90a"), "sm_90a", driver)
kernels.bind()
ops = Operators(kernels)
bf16 = dict(dtype=torch.bfloat16)
x, w, table = torch.ones(4, 5376, **bf16), torch.ones(5376, **bf16), torch.ones(3, 6, 5376, **bf16)
i = torch.zeros(4, dtype=torch.int32)
k, angle = torch.ones(128, **bf16), torch.ones(4, 48, **bf16)
ops.rms_norm(x, w, 1e-5)
ops.norm_modulate(x, w, table[:, 0], table[:, 1], i, 1e-5)
ops.gate_residual(x, x, table[:, 2], i)
ops.gate_norm_modulate(x, x, table[:, 2], w, table[:, 3], table[:, 4], i, 1e-5)
ops.final_norm_modulate(x, w, table[:, 0], table[:, 1], i, i, 1e-5)
ops.qk_norm_rope(torch.ones(4, 3 * 56 * 128, **bf16), k, k, angle, angle, 56, 56, 1e-5)
ops.swiglu(torch.ones(4, 2 * 14336, **bf16))
print(json.dumps({
    "launched": driver.launches,
    "fallbacks": ops.fallbacks,
    "sources": [name for name in sys.modules if name.startswith("kernels.aot")],
}))
"""


def test_nothing_compiles_at_run_time(tmp_path: Path) -> None:
    from kernels.catalog import specialisations
    from tests.kernels.interpreter import write_fake_kernels

    write_fake_kernels(tmp_path / "kernels", specialisations(MINIMAX_H3))
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"PATH": "", "HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"TRITON_CACHE_DIR": str(home / "triton"), "XDG_CACHE_HOME": str(home / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "kernels")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["launched"] == [
        "rms_norm",
        "norm_modulate",
        "gate_residual",
        "gate_norm_modulate",
        "final_norm_modulate",
        "qk_norm_rope",
        "swiglu",
    ]
    assert seen["fallbacks"] == {}
    assert seen["sources"] == []
    assert list(home.iterdir()) == []

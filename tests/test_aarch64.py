"""The C core on 64-bit Arm: cross-compiled, run on emulated processors.

Says whether results are right, nothing about speed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
pytestmark = pytest.mark.timeout(900)  # a busy machine compiles for minutes
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
VARIANTS = {  # by processor, best first
    "max": ["neon_i8mm", "neon_dotprod", "generic"],
    "max,sve=off": ["neon_i8mm", "neon_dotprod", "generic"],
    "cortex-a76": ["neon_dotprod", "generic"],
    "cortex-a53": ["generic"],
}
# Millions of values or whole sequences: minutes here. The kernels below are compared.
LONG = {"test_c11_lossless", "test_fmath", "test_kvcache"}


@pytest.fixture(scope="module")
def build() -> Path:
    """The library and its C tests, built for aarch64."""
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.fail(
            f"{' and '.join(missing)} not found; on Debian: "
            f"apt-get install --no-install-recommends {PACKAGES}"
        )
    toolchain = ROOT / "native" / "cmake" / "aarch64-linux-gnu.cmake"
    for command in (
        [
            *("cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), "-G", "Ninja"),
            *(f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", "-DES_WERROR=ON"),
        ],
        ["cmake", "--build", str(BUILD)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return BUILD


def emulate(
    processor: str, program: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EMULATOR, "-cpu", processor, "-L", "/usr/aarch64-linux-gnu", str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def native_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What test_kernels prints for plain C on the machine at hand."""
    program = tmp_path_factory.mktemp("native") / "test_kernels"
    sources = ["dispatch.c", "generic.c", "half.c"]
    subprocess.run(
        [
            *(os.environ.get("CC", "cc"), "-std=c11", "-O2", "-ffp-contract=off"),
            *("-I", str(ROOT / "native" / "include")),
            *("-I", str(ROOT / "native" / "src")),
            str(ROOT / "native" / "tests" / "test_kernels.c"),
            *(str(ROOT / "native" / "src" / "kernels" / name) for name in sources),
            *(str(ROOT / "native" / "src" / name) for name in ("cpu.c", "error.c")),
            *("-lm", "-o", str(program)),
        ],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


@pytest.mark.parametrize("processor", VARIANTS)
def test_variants_return_the_bits_of_plain_c(
    build: Path, native_hash: str, processor: str
) -> None:
    done = emulate(processor, build / "test_kernels")
    assert done.returncode == 0, done.stderr
    names, found = done.stdout.rsplit(":", 1)
    assert names.split() == VARIANTS[processor]
    assert found.strip() == native_hash


@pytest.mark.parametrize("processor", VARIANTS)
def test_dispatch(build: Path, processor: str) -> None:
    done = emulate(processor, build / "test_dispatch")
    assert done.returncode == 0, done.stderr


def test_c_tests(build: Path) -> None:
    """What ctest runs natively, less what takes long."""
    names = {p.name for p in build.glob("test_*") if os.access(p, os.X_OK)}
    assert names >= LONG | {"test_kernels", "test_dispatch"}
    for name in sorted(names - LONG - {"test_kernels", "test_dispatch"}):
        done = emulate("max", build / name)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_only_chosen_code_needs_newer_processors(build: Path, tmp_path: Path) -> None:
    """Dot products stay inside their own files, and the emulator refuses them."""
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", str(build / "libedgespec.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"\bsdot\b", listing) and re.search(r"\bsmmla\b", listing)
    source, program = tmp_path / "dot.c", tmp_path / "dot"
    source.write_text(
        "#include <arm_neon.h>\n"
        "int main(int argc, char **argv) { (void)argv;\n"
        "    int8x16_t x = vdupq_n_s8((signed char)argc);\n"
        "    return vaddvq_s32(vdotq_s32(vdupq_n_s32(0), x, x)) != 16; }\n"
    )
    flags = ["-O2", "-march=armv8.2-a+dotprod"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    assert emulate("cortex-a76", program).returncode == 0
    assert emulate("cortex-a53", program).returncode == -signal.SIGILL


def test_library_loads_with_pages_of_16_kib(build: Path) -> None:
    headers = subprocess.run(
        ["aarch64-linux-gnu-readelf", "-lW", str(build / "libedgespec.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    alignments = re.findall(r"^\s+LOAD .* (0x[0-9a-f]+)$", headers, re.MULTILINE)
    assert alignments and all(int(a, 16) % 16384 == 0 for a in alignments)

"""How the compiler works in tests, and in the processes that they start.

Compiling takes most of the time of the tests, so that they have the compiler go an older, shorter
way; it optimises as much. (Optimising less was tried: what compiling gains, running loses.) What
runs as a user would, notebooks and the commands of the README, has the compiler as it is, and
everything does with JAXCMLE_TEST_AS_SHIPPED=1 in the environment.
"""

import os
import subprocess
import sys

FLAGS = "XLA_FLAGS"
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=2"


def make_quick():
    """Set the flags for this process and its children; to be called before any computation."""
    given = os.environ.get(FLAGS, "")
    if QUICK in given or os.environ.get("JAXCMLE_TEST_AS_SHIPPED"):
        return
    flags = f"{given} {QUICK}".strip()
    if is_known(flags):
        os.environ[FLAGS] = flags


def is_known(flags):
    """Tell whether the compiler has such flags; if not, it would abort."""
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, FLAGS: flags}
    return subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0


def as_shipped():
    """Return an environment in which the compiler does what it does for users."""
    kept = {name: value for name, value in os.environ.items() if name != FLAGS}
    given = os.environ.get(FLAGS, "").replace(QUICK, "").strip()
    return {**kept, FLAGS: given} if given else kept


def with_devices(count):
    """Return an environment with so many simulated devices."""
    flag = f"--xla_force_host_platform_device_count={count}"
    return {**os.environ, FLAGS: f"{os.environ.get(FLAGS, '')} {flag}".strip()}

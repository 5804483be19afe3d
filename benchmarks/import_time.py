"""How long `import l2l_core` takes: beside `import torch`, in fresh processes, in turn, in processor seconds.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --rounds 21

The bar is torch and 0.3 s. Neither transformers nor anything of the notebook may be imported.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from _common import report

from workbench.commands.import_time import MOST_S, measure_imports


def main() -> int:
    """Print both medians and their difference; return 1 above the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured imports of each (default: %(default)s)")
    times = measure_imports(parser.parse_args().rounds)
    print(f"import torch     {times.torch_s:6.3f} s")
    print(f"import l2l_core  {times.engine_s:6.3f} s")
    print(f"difference       {times.added_s:6.3f} s (bar {MOST_S} s)")
    print(f"imported besides: {', '.join(times.heavy) or 'none of the notebook, no transformers'}")
    report("import_time", asdict(times) | {"added_s": times.added_s})
    return 1 if times.added_s > MOST_S or times.heavy else 0


if __name__ == "__main__":
    sys.exit(main())

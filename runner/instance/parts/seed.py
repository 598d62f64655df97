"""The CD image of a cloud-init seed, written by pycdlib; imported for instances that have one."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pycdlib import PyCdlib

from runner.base.errors import HostError
from runner.kernel.files import filled_memory
from runner.plan.cloud_init import LABEL, SeedPlan

YEARS = range(1900, 2156)
"""One byte counts the years from 1900 on (ECMA-119, 9.1.5, "Recording Date and Time")."""


@contextmanager
def opened_seed(seed: SeedPlan) -> Iterator[Mapping[str, int]]:
    """Hold *seed* as a file."""
    with filled_memory("cloud-init seed", seed_image(seed)) as image:
        yield {"seed": image}


def seed_image(seed: SeedPlan) -> bytes:
    """Return the documents of *seed* as a CD with Rock Ridge names for Linux and Joliet names for Windows, dated now.

    Raises :exc:`~runner.base.errors.HostError` when the clock is so wrong that a CD cannot have the date.
    """
    year = time.localtime().tm_year
    if year not in YEARS:
        raise HostError(
            f"cannot write the cloud-init seed: the clock says that it is the year {year}, and a CD can be dated {YEARS[0]} to {YEARS[-1]}",
            remedy="set the host's clock",
        )
    files = {
        "meta-data": seed.meta_data,
        "user-data": seed.user_data,
        "vendor-data": seed.vendor_data,
        "network-config": seed.network_config,
    }
    disc, written = PyCdlib(), io.BytesIO()
    disc.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
    for name, document in files.items():
        if document is not None:
            disc.add_fp(
                io.BytesIO(document.content),
                len(document.content),
                iso_path=f"/{name.replace('-', '_').upper()}.;1",  # ISO 9660 itself allows no hyphen
                rr_name=name,
                joliet_path=f"/{name}",
                file_mode=0o100444,
            )
    disc.write_fp(written)
    disc.close()
    return written.getvalue()

"""Everything in gossip that a peer can make grow, and how far, each with its reason."""

from __future__ import annotations

from typing import Final

#: A datagram that fits an Ethernet frame after IPv6 and UDP headers, with room for a tunnel's.
PACKET_BYTES_MAX: Final = 1400
#: A LAN has tens of people's own machines; the simulator is run up to 1,000.
MEMBERS_MAX: Final = 2048
#: Members without a record are only hearsay; a swarm that starts all at once has this many for a moment.
UNCONFIRMED_MAX: Final = 1024
#: The dead are forgotten but for (node, incarnation), so that old packets do not bring them back.
TOMBSTONES_MAX: Final = 4096
#: A router's record has the plan of a whole swarm: 1,000 nodes of 48 slices each are some 700 KB.
RECORD_BYTES_MAX: Final = 1 << 20
#: All records together take no more than this; a few KB each are usual.
RECORDS_BYTES_MAX: Final = 64 << 20
#: A digest tells of MEMBERS_MAX members in 30 bytes each, rounded up.
DIGEST_BYTES_MAX: Final = 128 << 10
#: A machine with four interfaces has some 12 addresses, IPv6 included.
ADDRESSES_MAX: Final = 16
#: One member has the addresses of its record, and a few that others told or that it called from.
PATHS_MAX: Final = ADDRESSES_MAX + 8
#: Addresses that were announced or named are tried whether they answer or not.
CANDIDATES_MAX: Final = 256
#: Indirect pings that a node carries out for others at a time: three ask for each suspect.
RELAYED_PINGS_MAX: Final = 256
#: Hosts that speak another version, or have another key, kept to be shown.
INCOMPATIBLE_MAX: Final = 64
#: Record pulls under way at a time; each holds a connection and up to RECORD_BYTES_MAX.
PULLS_MAX: Final = 4
#: The largest counter on the wire is what JSON and every language can hold.
COUNTER_MAX: Final = 2**53
#: A peer's word moves a node's own counters; near their end it is a fault or an attack.
CREDIBLE_MAX: Final = COUNTER_MAX - (1 << 40)

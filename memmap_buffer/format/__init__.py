"""The bytes on disk: this docstring is the specification of the format, version 1.

MUST and SHOULD are used as in RFC 2119. All numbers are little-endian, all arrays in C order.

The folder
----------
    schema.json            what is in the folder; a folder without it is not a buffer
    episodes.npy           (slots,) records of 64 bytes: the only place where an episode becomes visible
    state.npy              (1,) record of 256 bytes, and a journal of 1,024 words
    checksums.npy          (slots, columns) u4: a checksum a field
    data/<field>.npy       (slots, max_timesteps, *shape); one more timestep with `final`; packed: (rows, *shape)
    data/<f>.blobs.npy     of a compressed field only, whose `data/<f>.npy` is the index of these bytes: see "Blobs"
    data/<f>.dictionary.npy  of one that has a dictionary
    meta/<field>.npy       (slots, *shape)
    priority/<name>.*      optional, one tree of priorities each: `priority.tree_file` tells their format
    extra/                 optional, JSON: `extra/marks.json` holds labels and notes of episodes, see "Marks"
    .redo                  present only while an `update` is being carried out
    .redo.bad              the last one that failed its check; nothing reads it
    .lock                  locked by the one writer; readers never touch it
    .marks.lock            locked while marks are changed

Every array file MUST be exactly the header below followed by its elements, neither shorter nor longer. Readers MUST
refuse any other, and MUST NOT extend, truncate or delete it. The header is numpy's version 1.0: `93 4E 55 4D 50 59 01
00`, a u16 length, then `{'descr': D, 'fortran_order': False, 'shape': S, }` padded with spaces to a multiple of 64
bytes and ended by a newline, D and S as Python's `repr` writes them (`npy_header`). So no record crosses a sector.
Data, meta and checksums SHOULD be sparse; the other two SHOULD NOT, as readers look at all of them, and looking at
a hole of a file on a full tmpfs kills. Files are created as the umask says, those that are
locked 0600, as whoever can lock can stop the writer; all MUST be plain files, not links or pipes.

schema.json
-----------
UTF-8 JSON without a byte order mark, at most 1 MiB, no key twice, no NaN or Infinity: `{"format": "memmap-buffer",
"version": 1, "id", "layout": "grid" | "packed", "max_episodes", "max_timesteps", "spare_slots", "circular", "capacity",
"rows", "columns", "fields", "meta_fields", "ends", "skips_resets"}`. `id` is 32 hexadecimal digits, drawn at random
when the buffer is created or overwritten; a copy of it keeps them. slots = max_episodes + spare_slots. `rows` is null
in a grid and the total of all steps in a packed folder. `fields` and `meta_fields` map a name to `{"dtype", "shape",
"default", "final", "column"}`, `column` being its place in checksums.npy. `ends` is `{"terminated", "truncated"}`, each
the name of a field that is true (not 0) at the last step of an episode that ended so, or null; without `ends`, the
fields of these two names, if there are such of one number or bool. `skips_resets` is true where the step that an
environment takes after an episode's end is its reset, which is not stored; without it, false. It is about what is
written next, not about what is there. A compressed field, which is none of `meta_fields` and not of text, has three
keys more, `"codec", "blobs", "dictionary"`. Readers MUST refuse unknown keys, codecs and versions.
Names are dot-joined identifiers, `[A-Za-z][A-Za-z0-9_]*`, of at most 64 characters in all, distinct without regard
to case, no name being a dotted prefix of another. dtypes are the names of `dtypes.NUMERIC` and U1 … U4096; bfloat16
is stored as its bits in u2.

episodes.npy
------------
One record a slot:  generation u8 | serial u8 | length u4 | flags u2 | columns u2 | first_row u8 | time u4 | round u4
| term u4 | digest u4 | start u4 | stop u4 | check u8.

generation   even; odd while rows of this slot are overwritten; never 0 once written
serial       the episode's number, counted from 0, never used twice
length       timesteps, 1 … max_timesteps; while flag 8 is set, those that the digest is of
flags        1 has the final observation, 2 cut short, 4 deleted, 8 open, 16 ended by the field `terminated` of `ends`,
             32 has checksums, 64 a field of `ends` is true before the last step, too
first_row    the row of step 0 in every data file; rows of files with `final` lie `slot` further. In a grid it MUST
             be slot * max_timesteps
time         seconds since 1970 at publication
round        in which the last timestep was published, while flag 8 is set the first one: a counter modulo 2^32 that a
             step of several environments raises once, any other step once, too. By it the next writer of a ring knows
             which steps are the oldest: the step t of an episode is of round - (length - 1 - t)
term         of the writer that published: a counter that every taking of the lock raises
digest       with flag 32: CRC-32 of the first `columns` entries of the slot's row of checksums.npy, so that the row
             cannot be taken for another episode's. While flag 8 is set the row is not written: then it is of the
             checksums that the row will have, zeros where there is no field. Columns added later are not in it
start, stop  the timesteps start … stop - 1 are shown: a ring forgets an episode's first ones, and an open episode has
             more than `length`. One aligned word, written by itself, and not part of the check
check        a fold of the first six 8-byte words: h = 0x6D656D6D61706275;
             for each word w: h = (h ^ w) * 0x9E3779B97F4A7C15 mod 2^64; h ^= h >> 29

A record is valid if its check is right, its generation even and not 0, its length, flags and first_row within
bounds, start <= stop <= max_timesteps, length <= stop, and length == stop unless flag 8 is set. In a packed folder
those that share a row are all void. Visible are, of the valid records with start < stop and serial >= base, those whose
serial stands in one of them only, without the deleted flag, and of these the `max_episodes` highest serials. Only the
rows start … stop - 1 of a visible record may be read (and, with flag 1, the row at `stop` of files with `final`). The
rows before `start` stand as long as it is visible: its checksums and its generation are of all of them.

A writer with a `capacity` keeps the sum of all stop - start at that, at most: whenever it has shown steps, it raises
`start` where the oldest ones are. An episode of which no step is left, and to which none will be appended, gets an odd
generation, and its rows may be given back. So does one that only `max_episodes` hides, or `base` is raised beyond it:
as newer ones may leave before it, it would be seen again.

checksums.npy
-------------
The checksum of a field is of the bytes of its rows from step 0 to `length`, the final observation included; that of a
meta field is of its value; that of a compressed field, of the second word of each of these rows of the index followed
by the bytes of its blob. Each whole block of 4,096 bytes, counted from the first of these bytes, becomes the sum of its
512 words of 8 bytes modulo 2^64. The checksum is the CRC-32 (as zlib has it) of the sums, 8 bytes each, followed by the
bytes behind the last whole block: of less than a block the CRC-32 itself. Any change within one word of 8 bytes is
seen, and, but for one in 2^32, any block that was lost, is of something else or stands elsewhere. An exchange of words
within a block is not.

Blobs
-----
Each timestep of a compressed field is a blob of its own, so any is read alone. `codec` is `{"name": "zstd", "level"}`,
each blob a Zstandard frame that states its content size, without a checksum and a dictionary's number; or `{"name":
"jpeg", "quality", "subsampling"}`, each a baseline JPEG of a field of uint8 (height, width), (height, width, 1) or
(height, width, 3), the last stored as YCbCr. These keys say how a writer encodes; what a blob is follows from its
bytes.

data/<f>.npy is the index, u8 (slots, max_timesteps, 2), or (rows, 2) in a packed folder, one more timestep with
`final`. A row is offset | length + 2^32 number: where the blob begins in data/<f>.blobs.npy behind the header, its
bytes, and the number of its dictionary. A length of 0 is a row of zeros, one of 2^32 - 1 the field's default, both
without a blob, whose first word means nothing; and one of the bytes of a row is the row itself, as it is where
compressing it gives no fewer.

data/<f>.blobs.npy is u1 (slots, bytes of max_timesteps rows) in a grid, one more row with `final`, and `blobs` null;
and (`blobs`,) in a packed folder. The blobs of an episode MUST lie end to end in the order of its steps, the final
observation last; in a grid from the first byte of its slot on, in a packed folder each episode behind the one before. A
file SHOULD be sparse, as a slot's blobs fill the begin of its part only.

data/<f>.dictionary.npy is u1 (`dictionary`,), at most 2^24; `dictionary` is null where there is none. The number of a
dictionary is the CRC-32 of its bytes, 1 where that is 0; a blob without one has the number 0. A blob that is its row
has the number 0, too. A writer MAY leave blobs of the dictionary that is there beside others of none.

A field of lists, whose `shape` begins with null, has the same two files, `codec` null and no dictionary. A blob is the
members of one timestep's list, each of the rest of the shape; its length is a multiple of a member's bytes, 0 of an
empty list, and is not bounded by a row. In a grid a slot has room for 1,024 members a timestep of `max_timesteps`.

Readers MUST NOT take memory for what a blob says of itself before they have compared it with the row: its content size,
or height and width. They MUST refuse a blob that is not all in the file, is longer than a row, names another dictionary
than the one there, or does not decode to exactly one row, and SHOULD refuse a JPEG that is not baseline, as 12 bytes of
another may cost a pass over all of its rows. A blob is copied before it is decoded, as its slot may be written to
meanwhile; whoever copies an episode elsewhere copies its blobs, and SHOULD NOT encode them again.

state.npy
---------
base u8 (serials below it are cleared) | next u8 | synced u8 (serials below it are known to be on the disk) |
changes u8 | term u8 | pid u8 | time u8 | clean u8 | suspect u8 | boot u8[2] | host S64 | reserved u8 (1 if the disk
space of all files was taken at creation; no block of them is given back) | nonce u8 | unused u8[11] | journal u8[1024].
The first two words of `unused` are `inode` and `device`: those of state.npy itself, as stat(2) has them; 0 where they
were never written.
Each word is written by its own aligned 8-byte write, or store into a map. `changes` is raised after every visible
change, by the number of slots that it was of; the change number c is of the slot in entry c mod 1024 of the journal,
written before, or of any slot, where that is 2^64 - 1. A reader that is not more than 512 changes behind, also after it
has read the entries, may look at these slots alone. A row that was visible is changed only between two raises of
`changes`. The next serial is the larger of `next` and the highest serial in any valid record + 1.

Publishing
----------
The writer holds `.lock` by flock(2), as filelock takes it, and has raised `term`; before each change it compares `term`
with its own, and the folder and state.npy at its path with those that it has open, and stops if one differs. Before a
publication it MAY leave the look at the path out within 0.05 seconds of the last one. It names files only relative to
the folder that it has open, and MUST NOT remove one that it could not make. A slot is chosen that is neither visible
nor taken by an open episode. Then, in this order:

1. the slot's generation, odd   2. data, blobs before their index, and meta   3. the slot's checksums
   (durability "power": a barrier on each of these files)
4. the record with its even generation, in one write: the commit   ("power": a barrier)
5. the journal's entries; `next`, to the serial + 1; then `changes`

The record lies in one sector and one page, and its check covers its generation, so no kill, power cut or concurrent
read can take half of it for an episode. `start` and `stop` are one word, so neither is read without the other.

Between 1 and 4, or before it closes an open record, the writer MAY give blocks back that hold nothing but rows of its
own slot beyond those of the new record: of the episode that the slot held before. To a reader and to a crash that is a
write of zeros like those of step 2. It MUST NOT do so on a tmpfs, where a reader that is late would look at a hole.

Appending a step to an open record (flag 8) writes its rows at `stop` ("power": a barrier), then start and stop by one
write ("power": a barrier). Closing it, and any other change of it, replaces the record from the serial on by one write,
the generation unchanged; `checksums.npy` is written before. A flush does so with the steps whose rows it has waited
for. Of an open episode that is in doubt after a crash of the machine, only the first `length` steps are there.
Deleting sets flag 4 the same way, after raising `base` to the oldest visible serial so that nothing retired comes
back. Clearing sets `base` to `next`.

Updating in place
-----------------
`base` is raised to the oldest visible serial, so that nothing retired comes back while this episode is not visible, and
`.redo` gets all new bytes, of several episodes perhaps (`writing.redo`); then, for each of them, steps 1 to 5 with the
same serial, `changes` being raised behind step 1, too ("power": a barrier there, too, as these rows were visible
before, and one of each kind for all episodes); then `.redo` is removed. An open record keeps its flag 8 and its
`length`, and its digest is of the first `length` rows as they are then. Whoever takes the lock next carries through
what a valid `.redo` still asks for, removes one that was not finished, and renames any other to `.redo.bad`.

Marks
-----
`extra/marks.json`, UTF-8: `{"format": "memmap-buffer-marks", "version": 1, "folders": {id: {serial: {"labels": [text,
…], "note": text}}}}`, ids as in schema.json, serials in decimal, labels sorted, of 1 to 64 printable characters without
"!" in front, notes of at most 10,000 characters. Only marks of the folder's own id count, and only those of visible
serials; the next writer SHOULD drop others of its id. The file is replaced as a whole, by `marks.json.new` and a
rename, under an exclusive lock of `.marks.lock`, whoever holds `.lock`; readers need none. A copy of a folder that gets
another id has its own in the file.

Creating, opening, trusting
---------------------------
Creating and adding a field: the new schema as `schema.json.new`, the files (O_EXCL), then fsync, rename, fsync of the
folders. What only a `.new` names, the next writer MAY remove under the lock. A field gets a column of checksums.npy
that no record counts in; its checksums are written before the rename. Dropping and renaming fields: the schema as it is
as `schema.json.old`, the other one as `.new`, a second link to each file that is renamed, rename of the schema; then
what only `.old` names is removed, and `.old`, by the next writer if need be. `overwrite` removes the heads of
priorities, renames `schema.json` to `schema.json.new`, removes exactly the files that it lists, and then it. Taking the
lock raises `term`, draws `nonce`, by which copies that were both written to differ, stores pid, time, inode, device,
host and boot, clears `clean`, sets `synced` to 0 unless every publication has its barriers, and puts a barrier behind
that; if the folder was not `clean`, and its last writer was of another boot or it is a copy, it first sets `suspect` to
the next serial. A folder is a copy if `inode` is not 0 and another than that of state.npy, or, within one boot, as
devices are numbered anew, if `device` is: beside a writer its files, and pages of them, may have been copied at
different moments, so `synced` says nothing of it and is set to 0, before `inode` and `device` are stored. What the
writer finishes or closes for a dead one has barriers whatever its own durability; then `next` rises to what was found.
Closing puts barriers on all files, then sets `clean`. Serials from `synced` on, below `suspect` or (after another boot
without `clean`) all of them, and all serials of a copy that is not `clean`, MUST be checked against their checksums
before they are served (`verify="auto"`).

Writes go through `pwrite`, never through a map: a store into a mapped hole of a full disk kills the process by SIGBUS
where `pwrite` raises ENOSPC. Mapped pages are only read, and only where rows were written. Exceptions are step 5 and
steps that are appended to open records, both into blocks that are allocated first, on file systems that overwrite in
place and not with durability "power" (`writing.commit`, `writing.rounds`), and trees of priorities
(`priority.tree_file`). Should such a file system be mounted read-only while it is stored to, as after an error of the
disk, the process is killed; what it had published stays.
"""

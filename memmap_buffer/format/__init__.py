"""The bytes on disk: this docstring is the specification of the format, version 1.

MUST and SHOULD are used as in RFC 2119. All numbers are little-endian, all arrays in C order.

The folder
----------
    schema.json            what is in the folder; a folder without it is not a buffer
    episodes.npy           (slots,) records of 64 bytes: the only place where an episode becomes visible
    state.npy              (1,) record of 256 bytes, and a journal of 1,024 words
    checksums.npy          (slots, columns) u4: one checksum for each slot and field
    data/<field>.npy       (slots, max_timesteps, *shape); one more timestep with `final`; packed: (rows, *shape)
    data/<f>.blobs.npy     of a compressed field only: its bytes, for which `data/<f>.npy` is the index, see "Blobs"
    data/<f>.dictionary.npy  of a compressed field that has a dictionary
    meta/<field>.npy       (slots, *shape)
    priority/<name>.*      optional, one tree of priorities each: `priority.tree_file` tells their format
    extra/                 optional, JSON: `extra/marks.json` holds labels and notes of episodes, see "Marks"
    .redo                  present only while an `update` is being carried out
    .redo.bad              the last `.redo` that failed its check; nothing reads it
    .lock                  locked by the one writer; readers never touch it
    .marks.lock            locked while marks are changed

Every array file MUST be exactly the header below followed by its elements, neither shorter nor longer. Readers MUST
refuse any other file, and MUST NOT extend, truncate or delete it. The header is numpy's version 1.0: `93 4E 55 4D 50 59
01 00`, a u16 length, then `{'descr': D, 'fortran_order': False, 'shape': S, }` padded with spaces to a multiple of 64
bytes and ended by a newline, D and S as Python's `repr` writes them (`npy_header`). So no record crosses a sector.
The files of data, meta and checksums SHOULD be sparse. episodes.npy and state.npy SHOULD NOT: readers look at all of
their bytes, and on a full tmpfs a look at a hole through a map kills the process. Files get the mode that the umask
says; files that are locked get 0600, as whoever can lock can stop the writer. All MUST be plain files, not links or
pipes.

schema.json
-----------
UTF-8 JSON without a byte order mark, at most 1 MiB, no key twice, no NaN or Infinity: `{"format": "memmap-buffer",
"version": 1, "id", "layout": "grid" | "packed", "max_episodes", "max_timesteps", "spare_slots", "circular", "capacity",
"rows", "columns", "fields", "meta_fields", "ends", "skips_resets"}`. `id` is 32 hexadecimal digits, drawn at random
when the buffer is created or overwritten; a copy of it keeps them. slots = max_episodes + spare_slots. `rows` is null
in a grid and the total of all steps in a packed folder. `fields` and `meta_fields` map a name to `{"dtype", "shape",
"default", "final", "column"}`, `column` being its place in checksums.npy. `ends` is `{"terminated", "truncated"}`: for
each of the two, null or the name of a field that is true (not 0) at the last step of an episode that ended so. Without
`ends`, these are the fields named `terminated` and `truncated`, each if it exists and has one number or bool a
timestep. `skips_resets` is true where recording leaves out the step that an environment takes after an episode's end,
as that step is a reset; without the key, false. It governs what is written next and tells nothing of what is there. A
compressed field has three more keys, `"codec", "blobs", "dictionary"`; meta fields and fields of text are never
compressed. Readers MUST refuse unknown keys, codecs and versions.
Names are dot-joined identifiers, `[A-Za-z][A-Za-z0-9_]*`, of at most 64 characters in all. No two names may be equal
without regard to case, and none may be a dotted prefix of another. dtypes are the names of `dtypes.NUMERIC` and U1 …
U4096; bfloat16 is stored as its bits in u2.

episodes.npy
------------
One record a slot:  generation u8 | serial u8 | length u4 | flags u2 | columns u2 | first_row u8 | time u4 | round u4
| term u4 | digest u4 | start u4 | stop u4 | check u8.

generation   even; odd while rows of this slot are overwritten; never 0 once written
serial       the episode's number, counted from 0, never used twice
length       the number of timesteps, 1 … max_timesteps; while flag 8 is set, the number that the digest covers
flags        1 has the final observation, 2 cut short, 4 deleted, 8 open, 16 ended by the field `terminated` of `ends`,
             32 has checksums, 64 a field of `ends` is true before the last step, too
first_row    the row of step 0 in every data file; in files with `final` its row is first_row + slot. In a grid
             first_row MUST be slot * max_timesteps
time         seconds since 1970 at publication
round        the round in which the last timestep was published; while flag 8 is set, the first timestep. Rounds are
             counted modulo 2^32: one step of several environments together is one round, and so is any other step. So
             the next writer of a ring knows which steps are the oldest: the step t of an episode is of round
             - (length - 1 - t), and while flag 8 is set of round + t
term         the term of the writer that published: a counter that every taking of the lock raises
digest       with flag 32: CRC-32 of the first `columns` entries of the slot's row of checksums.npy, so that the row
             cannot be taken for another episode's. While flag 8 is set the row is not written yet, and the digest is of
             the entries that it would have, zeros where there is no field. Columns added later are not in it
start, stop  the timesteps start … stop - 1 are shown: a ring forgets an episode's first steps, and an open episode may
             show more than `length`. The two are one aligned word, written by itself, and not part of the check
check        a fold of the first six 8-byte words: h = 0x6D656D6D61706275;
             for each word w: h = (h ^ w) * 0x9E3779B97F4A7C15 mod 2^64; h ^= h >> 29

A record is valid if its check is right, its generation even and not 0, its length, flags and first_row within
bounds, start <= stop <= max_timesteps, length <= stop, and length == stop unless flag 8 is set. In a packed folder
records that share a row are all void. To find the visible records, take the valid ones with start < stop and serial >=
base; drop those whose serial stands in two of them; drop those with the deleted flag; keep the `max_episodes` highest
serials. Only the rows start … stop - 1 of a visible record may be read (and, with flag 1, the row at `stop` of files
with `final`). The rows before `start` keep their bytes as long as the record is visible: its checksums and its
generation cover them, too.

A writer with a `capacity` keeps the sum of stop - start of all visible records at `capacity` or below: after it has
shown new steps, it raises `start` of the records that have the oldest steps. An episode of which no step is left, and
to which none will be appended, gets an odd generation, and the space of its rows may be given back. An episode that
only `max_episodes` hides gets an odd generation, too, or `base` is raised beyond its serial: otherwise it would be seen
again when newer episodes leave before it.

checksums.npy
-------------
The checksum of a field covers the bytes of its rows from step 0 to step `length` - 1, then the final observation if
there is one; that of a meta field covers its value; that of a compressed field covers, for each of these rows, the
second word of the index and then the bytes of the blob. Each whole block of 4,096 bytes, counted from the first of
these bytes, becomes the sum of its 512 words of 8 bytes modulo 2^64. The checksum is the CRC-32 (as zlib has it) of the
sums, 8 bytes each, followed by the bytes behind the last whole block; for less than a block it is the CRC-32 of the
bytes themselves. Any change within one word of 8 bytes is seen, and, but for one in 2^32, any block that was lost, was
replaced or stands elsewhere. An exchange of words within a block is not seen.

Blobs
-----
Each timestep of a compressed field is a blob of its own, so any is read alone. `codec` is `{"name": "zstd", "level"}`,
each blob a Zstandard frame that states its content size, but no checksum and no number of a dictionary; or `{"name":
"jpeg", "quality", "subsampling"}`, each blob a baseline JPEG of a field of uint8 (height, width), (height, width, 1) or
(height, width, 3), the last stored as YCbCr. These keys say how a writer encodes; how a blob is decoded follows from
its bytes.

data/<f>.npy is the index, u8 (slots, max_timesteps, 2), or (rows, 2) in a packed folder, one more timestep with
`final`. A row of the index is two words, offset | length + 2^32 * number. The blob begins at `offset` in
data/<f>.blobs.npy, counted from the end of the header, has `length` bytes, and the dictionary of this number. Two
lengths mean that there is no blob, and that the offset means nothing: 0 for a row of zeros, 2^32 - 1 for the field's
default. A blob as long as an uncompressed row is that row itself: so rows are stored that compressing does not make
smaller.

data/<f>.blobs.npy is u1 (slots, bytes of max_timesteps rows) in a grid, one more row with `final`, and `blobs` is null.
In a packed folder it is u1 (`blobs`,). The blobs of an episode MUST lie end to end in the order of its steps, the final
observation last: in a grid from the first byte of its slot on, in a packed folder each episode behind the one before. A
file SHOULD be sparse, as a slot's blobs fill only the beginning of its part.

data/<f>.dictionary.npy is u1 (`dictionary`,), at most 2^24 bytes; `dictionary` is null where there is none. The number
of a dictionary is the CRC-32 of its bytes, or 1 where that is 0. A blob without a dictionary has the number 0, and so
has a blob that is an uncompressed row. A writer MAY leave blobs with the dictionary beside blobs without.

A field of lists, whose `shape` begins with null, has the same two files, `codec` null and no dictionary. A blob holds
the members of one timestep's list, each of the rest of the shape; its length is a multiple of a member's bytes, 0 for
an empty list, and may be longer than a row. In a grid a slot has room for 1,024 members a timestep of `max_timesteps`.

Readers MUST compare the size that a blob states (its content size, or height and width) with the row's before they
allocate memory for it. They MUST refuse a blob that is not all in the file, is longer than a row, names another
dictionary than the one there, or does not decode to exactly one row. They SHOULD refuse a JPEG that is not baseline, as
12 bytes of such a file may cost a pass over all of its rows. They copy a blob before they decode it, as its slot may be
written to meanwhile. Whoever copies an episode elsewhere copies its blobs, and SHOULD NOT encode them again.

state.npy
---------
base u8 (serials below it are cleared) | next u8 | synced u8 (serials below it are known to be on the disk) |
changes u8 | term u8 | pid u8 | time u8 | clean u8 | suspect u8 | boot u8[2] | host S64 | reserved u8 (1 if the disk
space of all files was taken at creation; no block of them is given back) | nonce u8 | unused u8[11] | journal u8[1024].
The first two words of `unused` are `inode` and `device`: those of state.npy itself, as stat(2) tells them; 0 where they
were never written.
Each word is written by its own aligned 8-byte write, or store into a map. `changes` is raised after every visible
change, by the number of slots that changed. Before that, the slot of change number c is written to entry c mod 1024 of
the journal; an entry of 2^64 - 1 says that any slot may have changed. A reader that is at most 512 changes behind, and
still is after it has read the entries, may look at the slots of these entries alone. A row that was visible is changed
only between two raises of `changes`. The next serial is the larger of `next` and the highest serial in any valid
record + 1.

Publishing
----------
The writer holds `.lock` by flock(2), as filelock takes it, and has raised `term`. Before each change it compares `term`
with its own term, and the folder and state.npy at its path with those that it has open, and stops if one differs.
Before a publication it MAY skip the look at the path if it looked within the last 0.05 seconds. It names files only
relative to the folder that it has open, and MUST NOT remove a file that it could not create. It chooses a slot that is
neither visible nor taken by an open episode. Then, in this order:

1. the slot's generation, odd   2. data, blobs before their index, and meta   3. the slot's checksums
   (durability "power": a barrier on each of these files)
4. the record with its even generation, in one write: the commit   ("power": a barrier)
5. the journal's entries; `next`, to the serial + 1; then `changes`

The record lies in one sector and one page, and its check covers its generation, so no kill, power cut or concurrent
read can take half of it for an episode. `start` and `stop` are one word, so neither is read without the other.

Between 1 and 4, or before it closes an open record, the writer MAY give blocks back that hold only rows of its own slot
beyond those of the new record: rows of the episode that the slot held before. For a reader and for a crash that is a
write of zeros, like the writes of step 2. It MUST NOT do so on a tmpfs, where a late reader would look at a hole.

Appending a step to an open record (flag 8) writes its rows at `stop` ("power": a barrier), then start and stop by one
write ("power": a barrier). Closing it, and any other change of it, replaces the record from the serial on by one write,
the generation unchanged; `checksums.npy` is written before. A flush replaces it in the same way, with a `length` of the
steps whose rows it has waited for. Of an open episode that is in doubt after a crash of the machine, only the first
`length` steps count. Deleting sets flag 4 in the same way, after raising `base` to the oldest visible serial so that no
retired episode comes back. Clearing sets `base` to `next`.

Updating in place
-----------------
First `base` is raised to the oldest visible serial, so that no retired episode comes back while this one is not
visible. Then all new bytes, perhaps of several episodes, are written to `.redo` (`writing.redo`). Then steps 1 to 5 are
taken for each episode, with the same serial, and `changes` is raised after step 1, too. ("power": also a barrier after
step 1, as these rows were visible before; each barrier is for all episodes together.) Then `.redo` is removed. An open
record keeps its flag 8 and its `length`, and its digest is of the first `length` rows as they are then. Whoever takes
the lock next carries out what a valid `.redo` still asks for, removes a `.redo` that was not finished, and renames any
other to `.redo.bad`.

Marks
-----
`extra/marks.json`, UTF-8: `{"format": "memmap-buffer-marks", "version": 1, "folders": {id: {serial: {"labels": [text,
…], "note": text}}}}`, ids as in schema.json, serials in decimal, labels sorted, of 1 to 64 printable characters without
"!" in front, notes of at most 10,000 characters. Only marks of the folder's own id count, and only those of visible
serials; whoever writes the file next SHOULD drop the other marks of this id. The file is replaced as a whole, by
`marks.json.new` and a rename, under an exclusive lock of `.marks.lock`, whoever holds `.lock`; readers need no lock. In
a copy of a folder that gets another id, the marks stand under that id.

Creating, opening, trusting
---------------------------
Creating a buffer and adding a field: write the new schema as `schema.json.new`, make the files (O_EXCL), fsync them and
their folders, rename the schema, fsync its folder. Files that only a `.new` names, the next writer MAY remove under the
lock. A new field gets a column of checksums.npy that no record counts among its `columns`; its checksums are written
before the rename.

Dropping and renaming fields: write the present schema as `schema.json.old`, the other one as `.new`, make a second link
to each file that is renamed, rename the schema. Then remove the files that only `.old` names, and `.old` itself; if
need be the next writer does that. `overwrite` removes the heads of priorities, renames `schema.json` to
`schema.json.new`, removes exactly the files that it lists, and then the schema.

Taking the lock raises `term`, draws `nonce` (by which two copies differ once both were written to), stores pid, time,
inode, device, host and boot, clears `clean`, sets `synced` to 0 unless every publication has its barriers, and puts a
barrier behind that. If the folder was not `clean`, and its last writer was of another boot or the folder is a copy,
`suspect` is set to the next serial before boot, inode and device are stored. A folder is a copy if `inode` is not 0 and
is not that of state.npy, or if `device` is not that of state.npy within one boot, as devices are numbered anew at a
boot. Beside a writer, the files of a copy, and pages of them, may have been copied at different moments: `synced` tells
nothing of a copy, and is set to 0 before `inode` and `device` are stored. If the writer finishes or closes what a dead
writer left, it uses barriers whatever its own durability; then it raises `next` to what it found. Closing puts barriers
on all files, then sets `clean`.

These serials MUST be checked against their checksums before they are served (`verify="auto"`): those from `synced` on
that are below `suspect`; after another boot without `clean`, all from `synced` on; in a copy that is not `clean`, all.

Writes go through `pwrite`, never through a map: a store into a mapped hole of a full disk kills the process by SIGBUS
where `pwrite` raises ENOSPC. Mapped pages are only read, and only where rows were written. There are two exceptions.
Step 5, and steps that are appended to open records, may be stores into a map, if durability is not "power" and the file
system overwrites in place; the blocks are allocated before (`writing.commit`, `writing.rounds`). And trees of
priorities are stored to (`priority.tree_file`). Should such a file system be mounted read-only during the stores, as
after an error of the disk, the process is killed; what it had published stays.
"""

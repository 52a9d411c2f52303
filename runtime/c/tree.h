/* What a tree is made of, for those who look at all of it. */
#ifndef KILN_TREE_H
#define KILN_TREE_H

#include "core.h"

/* ---- archives (archive.c) ---- */
typedef struct { const char *path; const uint8_t *data; size_t bytes; bool folder; } archive_entry; /* path: NAME or FOLDER/NAME */
typedef struct { archive_entry *entries; uint32_t count; } archive; /* sorted by path */
/* Reads the headers of a ustar or GNU archive; entries point into it. */
kiln_code kiln_archive_read(kiln_arena *arena, const uint8_t *data, size_t bytes, archive *out, kiln_error *error);
const archive_entry *kiln_archive_find(const archive *a, const char *path);
/* The entry of the folder that an entry lies in; NULL in the root, or if the archive has none for it. */
const archive_entry *kiln_archive_folder(const archive *a, const archive_entry *entry);

/* ---- listings (tree.c) ---- */
typedef enum { ENTRY_FILE, ENTRY_FOLDER, ENTRY_OTHER } entry_kind;
typedef kiln_code entry_seen(void *user, const char *name, entry_kind kind, uint64_t bytes);
/* Calls `seen` for everything in the root (folder NULL) or in a folder of it, until it returns another code than KILN_OK. */
kiln_code kiln_tree_list(kiln_tree *tree, const char *folder, entry_seen *seen, void *user, kiln_error *error);
/* KILN_OK if there is a folder of that name in the root that is no link. */
kiln_code kiln_tree_has_folder(kiln_tree *tree, const char *folder, kiln_error *error);

#endif

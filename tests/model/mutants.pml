/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mutants.pml - the rules that can be left out, one at a time.
 *
 * Each line is a mutant: its name, its number, the rule that it breaks, and what
 * a process then does.  The driver (checker.py) reads these lines.  The variable
 * `mutant` has the number of the one that is tried; 0 is the protocol itself.
 */
#define COUNTED_TWICE 1 /* N1: an entry is counted or un-counted whatever the ledger says */
#define FENCE_NOT_COMPARED 2 /* N2.1: an older catalog is used */
#define FENCE_NOT_WRITTEN_AT_START 3 /* N2.2: a fence that seems equal is trusted */
#define REBUILD_VALID_TOO_EARLY 4 /* N2.3: the catalog is valid before all images are counted */
#define REBUILD_WITHOUT_SYNC 5 /* N2.3: the rebuild syncs neither directory */
#define REBUILD_GOES_ON 6 /* N2.4: an interrupted rebuild counts only what it had not */
#define ONE_BYTE 7 /* N3: readers and writers share one lock byte */
#define LOCKS_BEFORE_THE_LOOK 8 /* N4.1: an entry that is live is judged by its locks */
#define WRITER_NOT_ASKED 9 /* N4.2: byte 0 is not tried */
#define WRITERS_LOCK_NOT_HELD 10 /* N4.2: byte 0 is tested and not held */
#define NO_SECOND_LOOK 11 /* N4.3: the name is not checked again under the lock */
#define READER_NOT_ASKED 12 /* N4.4: byte 1 is not tried */
#define READERS_LOCK_NOT_HELD 13 /* N4.4: byte 1 is tested and not held */
#define UNFINISHED_DELETE_DONE 14 /* N4.6: an unfinished delete counts as done */
#define DELETE_UNDER_WAY_SETTLED 15 /* N4.6: the image lock is not tried */
#define NO_SYNC_AFTER_THE_LOOK 16 /* N5.1: images/ is not fsynced */
#define NOT_COUNTED 17 /* N5.2: no batch is written */
#define COUNTED_IN_PART_NOT_TAKEN_BACK 18 /* N5.2: a begun recipe is not un-counted */
#define NO_FENCE 19 /* N5.3: the fence is not written */
#define FENCE_NOT_SYNCED 20 /* N5.3: the fence is written and not fsynced */
#define UNLINKED_BEFORE_THE_BATCH 21 /* N5.4: the entry goes first */
#define NO_EXCLUSIVE_LOCK 22 /* N6.1: the group's shared locks are ignored */
#define OPENED_BEFORE_THE_LOCKS 23 /* N6.1: the group's file is opened before its locks are taken */
#define JUDGED_BEFORE_THE_LOCK 24 /* N6.2: the spool is judged before the lock is taken */
#define NO_PINS 25 /* N6.3: entries that stay pin nothing */
#define BEGUN_NOT_PINNED 26 /* N6.3: a begun recipe pins nothing, and forbids nothing */
#define HOLES_BEFORE_THE_ENTRIES 27 /* N6.4: holes are punched before the entries are synced */
#define ENTRIES_BEFORE_THE_GENERATION 28 /* N6.4: entries are freed before the generation changes */
#define GENERATION_NOT_SYNCED 29 /* N6.4: the generation is not synced before the entries are */
#define SPOOL_FILE_NOT_TAKEN 30 /* N7.1: byte 0 and the name are not checked */
#define NAME_NOT_CHECKED 31 /* N7.1: byte 0 is taken and the name is not checked */
#define VERIFIED_BEFORE_THE_LOCK 32 /* N7.2: a hit is verified before the group's lock is taken */
#define STORE_BELIEVED 33 /* N7.2: a cached store is used whatever the generation */
#define LOADED_WITHOUT_THE_LOCK 34 /* N7.2: a store is loaded without the group's lock */
#define TAIL_OVERWRITTEN 35 /* N7.3: a tail is not settled */
#define TAIL_NOT_WRITTEN_AGAIN 36 /* N7.3: a tail is verified and not written again */
#define TAIL_NOT_VERIFIED 37 /* N7.3: a tail is published and not verified */
#define PUBLISHED_BEFORE_THE_SYNC 38 /* N7.4: blocks are published before they are synced */
#define POISONED_GROUP_USED 39 /* N7.4: a group whose sync failed is appended to */
#define SHARED_LOCK_RELEASED_EARLY 40 /* N7.4: the shared lock goes with the lease */
#define GROUP_NOT_SYNCED 41 /* N8.1: the group is not synced before the commit */
#define RECIPE_NOT_SYNCED 42 /* N8.2: the recipe is not fsynced */
#define SPOOL_NOT_SYNCED 43 /* N8.2: spool/ is not fsynced */
#define LINK_REPLACES 44 /* N8.3: an existing name is replaced */
#define IMAGES_NOT_SYNCED 45 /* N8.3: images/ is not fsynced before the acknowledgement */
#define LOCKS_NOT_COUNTED 46 /* N8.4: the end of one transaction drops the other's lock */
#define ABORTED_AFTER_THE_LINK 47 /* N8.5: an error after the link unlinks the spool file */
#define UNLINKED_AFTER_THE_LINK 48 /* N8.6: an error after the link unlinks the image */
#define NO_IMAGE_LOCK 49 /* N9.1: a delete does without the image lock */
#define DELETER_WITHOUT_BYTE_1 50 /* N9.2: a delete does without byte 1 */
#define DELETED_BY_RENAME 51 /* N9.3: the image is renamed to the name that its entry has */
#define DELETE_SPOOL_NOT_SYNCED 52 /* N9.4: spool/ is not fsynced before the unlink */
#define FAILED_DELETE_TAKEN_BACK 53 /* N9.5: a delete that fails unlinks its entry */
#define DELETE_IMAGES_NOT_SYNCED 54 /* N9.6: images/ is not fsynced before the acknowledgement */
#define REPLACEMENT_NOT_VERIFIED 55 /* N10.1: the new block is not verified */
#define MERGED_RECIPE_NOT_SYNCED 56 /* N10.2: M is not fsynced */
#define MERGE_SPOOL_NOT_SYNCED 57 /* N10.2: spool/ is not fsynced before M is counted */
#define EXCHANGED_BEFORE_THE_COUNTS 58 /* N10.3: M is not counted before the exchange */
#define MERGE_WITHOUT_IMAGE_LOCK 59 /* N10.4: the image lock is not taken */
#define OLD_RECIPE_NOT_COMPARED 60 /* N10.4: the name is not compared with the old recipe */
#define NO_ENTRY_FOR_THE_OLD 61 /* N10.5: the old recipe gets no entry */
#define MERGE_ENTRY_NOT_SYNCED 62 /* N10.5: spool/ is not fsynced before the exchange */
#define EXCHANGE_NOT_SYNCED 63 /* N10.7: images/ is not fsynced after the exchange */
#define READ_WITHOUT_A_LOCK 64 /* N11: a reader takes no lock */
#define READERS_NAME_NOT_CHECKED 65 /* N11: a reader does not check the name under its lock */
#define HELPER_WITHOUT_LEASE 66 /* N12.1: the helper does without the lease */
#define HELPER_TAKES_ANY_GROUP 67 /* N12.1: the group need not be sealed */
#define NEW_GROUP_NOT_SYNCED 68 /* N12.2: the new file is not fsynced before the exchange */
#define OLD_GROUP_NOT_SYNCED 69 /* N12.2: the old file is not fsynced before the exchange */
#define HELPER_WITHOUT_EXCLUSIVE_LOCK 70 /* N12.3: the files are exchanged under the lease alone */
#define GROUP_NOT_COMPARED 71 /* N12.4: the old file is not compared again under the locks */
#define GENERATION_NOT_COMPARED 72 /* N12.4: only the name is checked again */
#define GENERATION_KEPT 73 /* N12.5: the new file has the old one's generation */
#define NEXT_HOLDER_DOES_NOT_SETTLE 74 /* N12.6: the next holder does not fsync groups/ */
#define ENTRY_NOT_LOOKED_FOR 75 /* N9.4: a delete that lost its locks goes on without its entry */
#define NO_SECOND_NAME 76 /* N14.1: a name is replaced without a second one */
#define SECOND_NAME_NOT_LOOKED_FOR 77 /* N14.2: a reader tries the name alone */
#define NAMES_NOT_SETTLED 78 /* N14.3: a new maintainer settles no names */
#define DELETE_DOES_NOT_SETTLE 79 /* N14.3: a delete does not settle the name */
#define COMMIT_WITHOUT_IMAGE_LOCK 80 /* N14.4: a commit does without the image lock */
#define OLD_RECORD_APPENDED_TO 81 /* N13.1: a lessee reads the record from old pages */
#define OLD_ENTRIES_FOUND 82 /* N13.1: a hit is verified by entries from old pages */
#define OLD_ENTRIES_COLLECTED 83 /* N13.1: the collector reads record and entries from old pages */
#define OLD_RECIPE_JUDGED 84 /* N13.1: the accounting reads a recipe from old pages */

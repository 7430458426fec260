// Package keyrow makes the rows of keys in the lock table, and remembers which rows exist.
//
// A row is made on a control connection, in a transaction of its own. It may have to wait for the holder of a
// neighbour's row: while an insert splits an index page, InnoDB makes of the row lock of another transaction at
// REPEATABLE READ a lock of the gap in front of that row, too. Until that transaction ends, no row can be made in
// the gap. (Seen on MariaDB 10.11 in INNODB_LOCK_WAITS: an insert waits for the "supremum pseudo-record" of a
// transaction that has locked one row.) If the caller itself holds the neighbour's row, it waits for its own
// transaction. Then the control connection gives up after 10 s, and the caller gets lockerr.ErrNoAnswer. Keys that
// have been used before do not wait.
package keyrow

import (
	"cmp"
	"context"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/batch"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// background bounds work that must be done although its caller is gone.
const background = 10 * time.Second

// Config says where rows are kept.
type Config struct {
	Info      server.Info
	Control   *pool.Pool // connections in autocommit, which wait for a row for a few seconds at most
	Table     schema.Table
	Namespace string // precedes keys
	Auto      bool   // make the table if it is missing
	Stripes   int    // how many rows all keys share; 0 gives each key a row of its own
}

// Rows are the rows of one namespace. It is safe for concurrent use.
type Rows struct {
	known
	cfg     Config
	missing batch.Group[*missing]
}

// New returns the rows of a table. Call [schema.Table.Ensure] before.
func New(cfg Config) *Rows { return &Rows{cfg: cfg} }

// missing is what a caller of Exist waits for.
type missing struct {
	keys []string
	done chan struct{} // closed when err is set
	err  error
}

// maxMissing is how many callers have their rows made together.
const maxMissing = 100

// Exist makes the missing rows of keys. A row that is known to exist costs nothing. The
// rows of callers that come while all control connections are busy are made together.
func (r *Rows) Exist(ctx context.Context, keys []string) error {
	keys = r.known.missing(keys)
	if len(keys) == 0 {
		return nil
	}
	m := &missing{keys: keys, done: make(chan struct{})}
	if r.missing.Join(m) {
		go r.makeTogether() // not in the caller's context: others wait for it, too
	}
	select {
	case <-m.done:
		return m.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// makeTogether makes the rows of those who wait once there is a connection for it.
func (r *Rows) makeTogether() {
	for more := true; more; {
		var some []*missing
		ctx, cancel := server.Within(context.Background(), background)
		err := r.make(ctx, func() (keys []string) {
			some, more = r.missing.Depart(maxMissing)
			for _, m := range some {
				keys = append(keys, m.keys...)
			}
			slices.Sort(keys)
			return slices.Compact(keys)
		})
		cancel()
		for _, m := range some {
			if m.err = err; err != nil && len(some) > 1 {
				go r.makeAlone(m) // the others need not fail for one
				continue
			}
			close(m.done)
		}
	}
}

// makeAlone makes the rows of one.
func (r *Rows) makeAlone(m *missing) {
	defer close(m.done)
	ctx, cancel := server.Within(context.Background(), background)
	defer cancel()
	m.err = r.make(ctx, func() []string { return m.keys })
}

// Agree is for keys that share rows. It makes the rows, and a note of their number in the
// table. All programs that use the namespace must have the same number, since their locks
// would not exclude each other else. conn is in autocommit; Agree closes it if it may be
// left in a transaction.
func (r *Rows) Agree(ctx context.Context, conn driver.Conn) error {
	stripes, err := r.noted(ctx, conn)
	if err == nil && stripes == 0 {
		if err = r.note(ctx, conn); err == nil {
			stripes, err = r.noted(ctx, conn)
		}
	}
	switch {
	case errors.Is(err, lockerr.ErrUnsafe):
		return err
	case err != nil:
		return fmt.Errorf("agreeing on how many rows keys share: %w", server.OfControl(err))
	case stripes != r.cfg.Stripes:
		return r.disagree(fmt.Sprintf("other programs of the namespace use %d", stripes))
	}
	const atOnce = 1000
	for first := 0; first < stripes; first += atOnce {
		var names []string
		for i := first; i < min(first+atOnce, stripes); i++ {
			names = append(names, StripeName(i))
		}
		if err := r.Exist(ctx, names); err != nil {
			return err
		}
	}
	return nil
}

// noted reads how many rows the keys share; 0 without a note.
func (r *Rows) noted(ctx context.Context, conn driver.Conn) (int, error) {
	token, err := r.read(ctx, conn, nil)
	if err != nil || token[schema.Stripes] == "" {
		return 0, err
	}
	return strconv.Atoi(token[schema.Stripes])
}

// note notes how many rows the keys share, if no key has a row of its own yet. It locks
// the high-water row meanwhile, so that no one makes such a row.
// Between START TRANSACTION and COMMIT it sends, one after the other, for 64 rows:
//
//	SELECT 1 FROM mysqllock WHERE namespace = '' AND name = '' FOR UPDATE;
//	SELECT 1 FROM mysqllock WHERE namespace = 'app' AND NOT (LEFT(name, 7) = '\0stripe')
//	  AND NOT (namespace = '' AND name = '') LIMIT 1;
//	INSERT IGNORE INTO mysqllock (namespace, name, token) VALUES ('app', '\0stripes', 64)
func (r *Rows) note(ctx context.Context, conn driver.Conn) (err error) {
	if err := server.Exec(ctx, conn, "START TRANSACTION"); err != nil {
		return err
	}
	defer func() {
		end := "COMMIT"
		if err != nil {
			end = "ROLLBACK"
		}
		own, cancel := server.Within(context.WithoutCancel(ctx), background)
		defer cancel()
		if endErr := server.Exec(own, conn, end); endErr != nil {
			_ = conn.Close()
			err = cmp.Or(err, endErr)
		}
	}()
	t := r.cfg.Table.String()
	if _, err := server.Query(ctx, conn, "SELECT 1 FROM "+t+" WHERE "+schema.HighWater+" FOR UPDATE"); err != nil {
		return err
	}
	rows, err := server.Query(ctx, conn, "SELECT 1 FROM "+t+" WHERE namespace = "+schema.Literal(r.cfg.Namespace)+
		" AND NOT ("+shared+") AND NOT ("+schema.HighWater+") LIMIT 1")
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		return r.disagree("the namespace has keys with rows of their own")
	}
	return server.Exec(ctx, conn, fmt.Sprintf("INSERT IGNORE INTO %s (namespace, name, token) VALUES (%s, %s, %d)",
		t, schema.Literal(r.cfg.Namespace), schema.Literal(schema.Stripes), r.cfg.Stripes))
}

// shared is the condition for rows that keys share, and for their note.
var shared = fmt.Sprintf("LEFT(name, %d) = %s", len(schema.Stripes)-1, schema.Literal(schema.Stripes[:len(schema.Stripes)-1]))

func (r *Rows) disagree(why string) error {
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"lockStripes is %[1]d here, but %[2]s: their locks would not exclude each other;"+
			" use the same lockStripes everywhere, or to change it, stop all programs that use the namespace and run:\n"+
			"UPDATE %[3]s, (SELECT MAX(token) AS highest FROM %[3]s) d SET token = GREATEST(token, highest) WHERE %[4]s;\n"+
			"DELETE FROM %[3]s WHERE namespace = %[5]s AND NOT (%[4]s);\n"+
			"the first statement keeps tokens growing",
		r.cfg.Stripes, why, r.cfg.Table, schema.HighWater, schema.Literal(r.cfg.Namespace)))
}

// arrival is how long a row of another node of a cluster may take to arrive here.
const arrival = 100 * time.Millisecond

// ErrNoRow says that a key's row is missing that was made.
var ErrNoRow = lockerr.With(lockerr.ErrUnsafe, errors.New("a key's row in the lock table has vanished again and again;"+
	" remove rows only by the clean-up"))

// Renew is Forget and then Exist, before another attempt. In a cluster it waits a moment
// first: the rows of one node may be on their way to another.
func (r *Rows) Renew(ctx context.Context, keys []string) error {
	r.Forget(keys)
	if r.cfg.Info.Topology != "" {
		select {
		case <-time.After(arrival):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return r.Exist(ctx, keys)
}

// Cleaning reports whether a clean-up is running. It locks unused rows for moments, so a
// request without a wait may have been refused because of that. A clean-up shows by a
// named lock: if the server has none, or does not answer, Cleaning returns false.
func (r *Rows) Cleaning(ctx context.Context) bool {
	if !r.cfg.Info.SkipLocked || !r.cfg.Info.NamedLocks {
		return false
	}
	ctx, cancel := server.Within(ctx, time.Second) // its caller does not want to wait
	defer cancel()
	c, err := r.cfg.Control.Acquire(ctx)
	if err != nil {
		return false
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, r.cfg.Table.CleaningSQL())
	return err == nil && len(rows) > 0
}

// make makes the missing rows of keys, for which it asks once it has a connection. That is
// one of its own: it is not part of a transaction, and does not wait for the holder of a key.
// Two processes that make the same row at the same time can deadlock if a clean-up has just
// removed it, and so can two nodes of a cluster. Then make tries again, and finds the row of
// the other.
func (r *Rows) make(ctx context.Context, keys func() []string) error {
	ask := sync.OnceValue(keys)
	for tries := 1; ; tries++ {
		c, err := r.cfg.Control.Acquire(ctx)
		names := ask() // also if there is none: they are told
		if err != nil {
			return fmt.Errorf("connecting to make the keys' rows: %w", server.OfControl(err))
		}
		err = r.makeOn(ctx, c.Conn, names)
		gone := server.Gone(err, c.Conn)
		c.Release()
		if err == nil {
			return nil
		}
		deadlock := server.Deadlock(err)
		locked := server.Locked(err) && tries == 1 // perhaps another process was quicker, and holds the row by now
		if !gone && !deadlock && !locked || gone && tries >= 3 {
			return fmt.Errorf("making the keys' rows: %w", server.Explain(server.OfControl(err)))
		}
		if deadlock && tries > 1 { // until ctx ends
			time.Sleep(time.Duration(min(tries, 10)) * 10 * time.Millisecond)
		}
	}
}

// makeOn makes the rows that are missing, on conn.
func (r *Rows) makeOn(ctx context.Context, conn driver.Conn, keys []string) error {
	token, err := r.tokens(ctx, conn, keys)
	if err != nil {
		return err
	}
	if token[schema.Stripes] != "" && r.cfg.Stripes == 0 {
		return r.disagree("other programs of the namespace use " + token[schema.Stripes])
	}
	if missing := slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return token[key] != "" }); len(missing) > 0 {
		if err := r.insert(ctx, conn, missing); err != nil {
			return err
		}
	}
	for _, key := range keys {
		r.add(key, past{lease: token[key] != "" && token[key] != "0"})
	}
	return nil
}

// tokens is read for a table that may be missing by now, or lack its high-water row: it makes these anew.
func (r *Rows) tokens(ctx context.Context, conn driver.Conn, keys []string) (map[string]string, error) {
	token, err := r.read(ctx, conn, keys)
	if server.Missing(err) { // the table was dropped meanwhile
		if err = r.ensure(ctx, conn); err == nil {
			token, err = r.read(ctx, conn, keys)
		}
	}
	if err == nil && token[highWater] == "" {
		err = r.ensure(ctx, conn)
	}
	return token, err
}

// insert makes the rows of keys. It fails if the keys of the namespace share rows by now.
func (r *Rows) insert(ctx context.Context, conn driver.Conn, keys []string) error {
	if err := server.Exec(ctx, conn, r.insertSQL(keys)); err != nil {
		return err
	}
	if r.cfg.Stripes != 0 {
		return nil
	}
	stripes, err := r.noted(ctx, conn) // the insert may have waited for the note
	if err == nil && stripes != 0 {
		err = r.disagree(fmt.Sprintf("other programs of the namespace use %d", stripes))
	}
	return err
}

func (r *Rows) ensure(ctx context.Context, conn driver.Conn) error {
	return r.cfg.Table.Anew().Ensure(ctx, conn, r.cfg.Info, r.cfg.Auto)
}

// highWater stands for the high-water mark among the keys. No key is empty.
const highWater = ""

// read returns the tokens of the rows of keys, of the high-water mark, and of the note that keys
// share rows. It is a plain read, which waits for no lock.
func (r *Rows) read(ctx context.Context, conn driver.Conn, keys []string) (map[string]string, error) {
	rows, err := server.Query(ctx, conn, r.readSQL(keys))
	if err != nil {
		return nil, err
	}
	token := make(map[string]string)
	for _, row := range rows {
		if len(row) != 2 {
			return nil, errors.New("unexpected result when reading which keys have rows")
		}
		token[row[0]] = row[1]
	}
	return token, nil
}

// readSQL is the text of read:
//
//	SELECT name, token FROM mysqllock WHERE namespace = 'app' AND name IN ('k', '\0stripes')
//	UNION ALL SELECT name, token FROM mysqllock WHERE namespace = '' AND name = ''
func (r *Rows) readSQL(keys []string) string {
	from := "SELECT name, token FROM " + r.cfg.Table.String() + " WHERE "
	return from + schema.Rows(r.cfg.Namespace, append(slices.Clone(keys), schema.Stripes)) + " UNION ALL " + from + schema.HighWater
}

// insertSQL makes the rows of keys, with the token of the high-water row. It locks that row first:
// so it waits for a clean-up that is about to raise the high-water mark, and for a program that
// notes that keys share rows; and none of them begins before the rows exist. For two keys:
//
//	INSERT IGNORE INTO mysqllock (namespace, name, token, expires)
//	SELECT 'app', k, token, UTC_TIMESTAMP(6) FROM mysqllock JOIN (SELECT 'k' AS k UNION ALL SELECT 'l') d
//	WHERE namespace = '' AND name = '' LOCK IN SHARE MODE
func (r *Rows) insertSQL(keys []string) string {
	lines := make([][]string, len(keys))
	for i, key := range keys {
		lines[i] = []string{schema.Literal(key)}
	}
	lock := " LOCK IN SHARE MODE"
	if r.cfg.Info.Share == "" {
		lock = " FOR UPDATE"
	}
	return "INSERT IGNORE INTO " + r.cfg.Table.String() + " (namespace, name, token, expires)" +
		" SELECT " + schema.Literal(r.cfg.Namespace) + ", k, token, UTC_TIMESTAMP(6)" +
		" FROM " + r.cfg.Table.String() + " JOIN " + schema.List(lines, "k") + " WHERE " + schema.HighWater + lock
}

// known remembers which keys have rows, and what these rows have had. It is bounded: when the
// newer half is full, the older half is forgotten. A forgotten key costs one plain read.
type known struct {
	mu           sync.Mutex
	newer, older map[string]past
}

// past is what a key's row is known to have had at some time.
type past struct {
	lease   bool
	version bool // and has for ever: see package schema
}

const knownHalf = 16384 // keys; both halves of 40-byte keys are about 3 MB

// missing returns those of keys that are not remembered.
func (k *known) missing(keys []string) (out []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		if _, ok := k.newer[key]; ok {
			continue
		}
		if p, ok := k.older[key]; ok {
			k.put(key, p)
			continue
		}
		out = append(out, key)
	}
	return out
}

// add remembers key, with p beside what is known of it.
func (k *known) add(key string, p past) {
	k.mu.Lock()
	defer k.mu.Unlock()
	before := k.past(key)
	k.put(key, past{before.lease || p.lease, before.version || p.version})
}

// past returns what is known of key. k.mu is held.
func (k *known) past(key string) past {
	if p, ok := k.newer[key]; ok {
		return p
	}
	return k.older[key]
}

// NoteLeased notes that key's row has a lease, or had one.
func (k *known) NoteLeased(key string) { k.add(key, past{lease: true}) }

// NoteVersioned notes that key's row has a version.
func (k *known) NoteVersioned(key string) { k.add(key, past{version: true}) }

// Leased reports whether key's row is known to have had a lease at some time.
func (k *known) Leased(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.past(key).lease
}

// Versioned reports whether key's row is known to have a version.
func (k *known) Versioned(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.past(key).version
}

// Forget is for keys whose rows have turned out to be missing.
func (k *known) Forget(keys []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		delete(k.newer, key)
		delete(k.older, key)
	}
}

func (k *known) put(key string, p past) {
	if _, ok := k.newer[key]; !ok && (k.newer == nil || len(k.newer) >= knownHalf) {
		k.newer, k.older = make(map[string]past), k.newer
	}
	k.newer[key] = p
}

// OwnerOf names this process, as one that does not name itself: its host, its id, and the program
// that is at path.
func OwnerOf(path string) string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s:%d:%s", host, os.Getpid(), filepath.Base(path))
}

// LeftSuffix is the end of the owner of a lease that was given back, and stays for its MinHold.
const LeftSuffix = "#00000000"

// HolderOf returns the holder of a lease, from the row's owner: that is the lockOwner, and
// "#" with eight hexadecimal digits, which differ between two owners of the same name. It
// is nil if owner is empty.
func HolderOf(owner string) *lockerr.Holder {
	if owner == "" {
		return nil
	}
	program := owner
	if i := len(owner) - 9; i >= 0 && owner[i] == '#' {
		if _, err := hex.DecodeString(owner[i+1:]); err == nil {
			program = owner[:i]
		}
	}
	return &lockerr.Holder{Program: program, Left: strings.HasSuffix(owner, LeftSuffix)}
}

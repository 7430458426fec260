// Package keyrow makes the keys' rows in the lock table, and remembers which
// are there.
package keyrow

import (
	"cmp"
	"context"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// background bounds what must be done although its caller has gone.
const background = 10 * time.Second

// Config says where rows are kept.
type Config struct {
	Control   *pool.Pool // connections in autocommit
	Table     schema.Table
	Namespace string
	Info      server.Info
	Auto      bool // make the table where it is missing
	Procedure bool // the table's procedure is there
	Stripes   int  // how many rows all keys share; 0 is a row of its own for each
}

// Rows are the rows of one namespace. It is safe for concurrent use.
type Rows struct {
	cfg       Config
	known     known
	making    singleflight.Group
	procedure atomic.Bool
}

// New returns the rows of a table that [schema.Table.Ensure] has seen to.
func New(cfg Config) *Rows {
	r := &Rows{cfg: cfg}
	r.procedure.Store(cfg.Procedure)
	return r
}

// Procedure reports whether the table's procedure is there.
func (r *Rows) Procedure() bool { return r.procedure.Load() }

// NoProcedure notes that it is not, or not ours to execute.
func (r *Rows) NoProcedure() { r.procedure.Store(false) }

// Exist sees to it that each of keys, which are sorted, has a row. One that is
// known to have costs nothing.
func (r *Rows) Exist(ctx context.Context, keys []string) error {
	missing := r.known.missing(keys)
	if len(missing) == 0 {
		return nil
	}
	made := r.making.DoChan(strings.Join(missing, "\x00"), func() (any, error) {
		// Not the caller's context: others may be waiting for the same rows.
		ctx, cancel := context.WithTimeout(context.Background(), background)
		defer cancel()
		return nil, r.make(ctx, missing)
	})
	select {
	case r := <-made:
		return r.Err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Agree is for keys that share rows. It makes these, and a note of how many they
// are, by which all who use the namespace agree: else they would not exclude each
// other. conn is in autocommit, and is closed where it may be left otherwise.
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
		return fmt.Errorf("agreeing on how many rows keys share: %w", noBadConn(err))
	case stripes != r.cfg.Stripes:
		return r.disagree(fmt.Sprintf("others of the namespace have %d", stripes))
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

// noted reads how many rows the keys share; 0 where nobody has said.
func (r *Rows) noted(ctx context.Context, conn driver.Conn) (int, error) {
	rows, err := server.Query(ctx, conn, "SELECT token FROM "+r.cfg.Table.String()+" WHERE "+r.stripesRow())
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	return strconv.Atoi(rows[0][0])
}

// stripesRow is the condition of the note.
func (r *Rows) stripesRow() string {
	return "namespace = " + schema.Literal(r.cfg.Namespace) + " AND name = " + schema.Literal(schema.Stripes)
}

// note notes how many rows the keys are to share, where none has a row of its own
// yet. The floor is locked meanwhile, so that nobody makes one.
func (r *Rows) note(ctx context.Context, conn driver.Conn) (err error) {
	if err := server.Exec(ctx, conn, "START TRANSACTION"); err != nil {
		return err
	}
	defer func() {
		end := "COMMIT"
		if err != nil {
			end = "ROLLBACK"
		}
		own, cancel := context.WithTimeout(context.WithoutCancel(ctx), background)
		defer cancel()
		if endErr := server.Exec(own, conn, end); endErr != nil {
			_ = conn.Close()
			err = cmp.Or(err, endErr)
		}
	}()
	t := r.cfg.Table.String()
	if _, err := server.Query(ctx, conn, "SELECT 1 FROM "+t+" WHERE "+schema.Floor+" FOR UPDATE"); err != nil {
		return err
	}
	rows, err := server.Query(ctx, conn, "SELECT 1 FROM "+t+" WHERE namespace = "+schema.Literal(r.cfg.Namespace)+
		" AND NOT ("+shared+") AND NOT ("+schema.Floor+") LIMIT 1")
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		return r.disagree("the namespace has keys with rows of their own")
	}
	return server.Exec(ctx, conn, fmt.Sprintf("INSERT IGNORE INTO %s (namespace, name, token) VALUES (%s, %s, %d)",
		t, schema.Literal(r.cfg.Namespace), schema.Literal(schema.Stripes), r.cfg.Stripes))
}

// shared is the condition of the rows that are there because keys share them.
var shared = fmt.Sprintf("LEFT(name, %d) = %s", len(schema.Stripes)-1, schema.Literal(schema.Stripes[:len(schema.Stripes)-1]))

func (r *Rows) disagree(why string) error {
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"lockStripes is %[1]d here, and %[2]s, so that locks would not exclude each other; to change it stop all programs that use the namespace and run:\n"+
			"UPDATE %[3]s, (SELECT MAX(token) AS highest FROM %[3]s) d SET token = GREATEST(token, highest) WHERE %[4]s;\n"+
			"DELETE FROM %[3]s WHERE namespace = %[5]s AND NOT (%[4]s);\n"+
			"the first keeps tokens growing",
		r.cfg.Stripes, why, r.cfg.Table, schema.Floor, schema.Literal(r.cfg.Namespace)))
}

// Forget is for keys whose rows have turned out not to be there.
func (r *Rows) Forget(keys []string) { r.known.forget(keys) }

// arrival is how long what another node of a cluster has made may take to arrive.
const arrival = 100 * time.Millisecond

// Renew is Forget and then Exist, for who tries again: in a cluster rows that are
// there on one node may be on their way to another.
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

// Leased reports whether key's row is known to have had a lease at some time.
func (r *Rows) Leased(key string) bool { return r.known.leased(key) }

// NoteLeased notes that key's row has a lease, or had one.
func (r *Rows) NoteLeased(key string) { r.known.add(key, true) }

// make makes those rows of keys that are not there, on a connection of its own:
// never in a transaction, and not behind who holds one of the keys.
// Two processes that at once make a row which a clean-up has just removed can
// end in a deadlock, and so can two nodes of a cluster that make the same; the
// other's row is there the next time, or soon.
func (r *Rows) make(ctx context.Context, keys []string) error {
	for tries := 1; ; tries++ {
		c, err := r.cfg.Control.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("connecting to make the keys' rows: %w", noBadConn(err))
		}
		err = r.makeOn(ctx, c.Conn, keys)
		gone := server.Gone(err, c.Conn)
		c.Release()
		if err == nil {
			return nil
		}
		deadlock := server.Deadlock(err)
		locked := server.Locked(err) && tries == 1 // perhaps by who was quicker to make it, and is in it by now
		if !gone && !deadlock && !locked || gone && tries >= 3 {
			return fmt.Errorf("making the keys' rows: %w", noBadConn(err))
		}
		if deadlock && tries > 1 { // until ctx ends
			time.Sleep(time.Duration(min(tries, 10)) * 10 * time.Millisecond)
		}
	}
}

func (r *Rows) makeOn(ctx context.Context, conn driver.Conn, keys []string) error {
	token, err := r.read(ctx, conn, keys)
	if server.Missing(err) { // the table was dropped under us
		if err = r.ensure(ctx, conn); err == nil {
			token, err = r.read(ctx, conn, keys)
		}
	}
	if err != nil {
		return err
	}
	if token[floor] == "" {
		if err := r.ensure(ctx, conn); err != nil {
			return err
		}
	}
	if token[schema.Stripes] != "" && r.cfg.Stripes == 0 {
		return r.disagree("others of the namespace have " + token[schema.Stripes])
	}
	var lacking []string
	for _, key := range keys {
		if token[key] == "" {
			lacking = append(lacking, key)
		}
	}
	if len(lacking) > 0 {
		if err := server.Exec(ctx, conn, r.insertSQL(lacking)); err != nil {
			return err
		}
		if r.cfg.Stripes == 0 { // it may have waited for who has made the note
			stripes, err := r.noted(ctx, conn)
			if err == nil && stripes != 0 {
				err = r.disagree(fmt.Sprintf("others of the namespace have %d", stripes))
			}
			if err != nil {
				return err
			}
		}
	}
	for _, key := range keys {
		r.known.add(key, token[key] != "" && token[key] != "0")
	}
	return nil
}

func (r *Rows) ensure(ctx context.Context, conn driver.Conn) error {
	procedure, err := r.cfg.Table.Ensure(ctx, conn, r.cfg.Info, r.cfg.Auto)
	if err == nil {
		r.procedure.Store(procedure)
	}
	return err
}

// floor stands for the floor among the keys, of which none is empty.
const floor = ""

// read returns the tokens of those of keys that have a row, of the floor, and of
// the note that keys share rows. It is a plain read, which waits for nobody.
func (r *Rows) read(ctx context.Context, conn driver.Conn, keys []string) (map[string]string, error) {
	rows, err := server.Query(ctx, conn, r.readSQL(keys))
	if err != nil {
		return nil, err
	}
	token := make(map[string]string)
	for _, row := range rows {
		if len(row) != 2 {
			return nil, errors.New("the server does not say which keys have rows")
		}
		token[row[0]] = row[1]
	}
	return token, nil
}

func (r *Rows) readSQL(keys []string) string {
	var in []string
	for _, key := range keys {
		in = append(in, schema.Literal(key))
	}
	if r.cfg.Stripes == 0 {
		in = append(in, schema.Literal(schema.Stripes))
	}
	from := "SELECT name, token FROM " + r.cfg.Table.String() + " WHERE "
	return from + "namespace = " + schema.Literal(r.cfg.Namespace) + " AND name IN (" + strings.Join(in, ", ") + ")" +
		" UNION ALL " + from + schema.Floor
}

// insertSQL makes the rows of keys, which begin with the floor's token. The
// floor is locked first: a clean-up that is about to raise it is waited for,
// and none begins before the rows are there. So it is with who notes that keys
// share rows.
func (r *Rows) insertSQL(keys []string) string {
	lines := "SELECT " + schema.Literal(keys[0]) + " AS k"
	for _, key := range keys[1:] {
		lines += " UNION ALL SELECT " + schema.Literal(key)
	}
	return "INSERT IGNORE INTO " + r.cfg.Table.String() + " (namespace, name, token, expires)" +
		" SELECT " + schema.Literal(r.cfg.Namespace) + ", k, token, UTC_TIMESTAMP(6)" +
		" FROM " + r.cfg.Table.String() + " JOIN (" + lines + ") d WHERE " + schema.Floor + " LOCK IN SHARE MODE"
}

// HolderOf says who has a lease, from the row's owner: the lockOwner, and a mark
// of "#" and eight hexadecimal digits that tells apart two of the same name. It
// is nil where there is none.
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
	return &lockerr.Holder{Program: program}
}

// noBadConn keeps database/sql from taking the failure of another connection
// for one of its own.
func noBadConn(err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return errors.New(err.Error())
	}
	return err
}

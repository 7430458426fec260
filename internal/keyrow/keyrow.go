// Package keyrow makes the keys' rows in the lock table, and remembers which
// are there.
package keyrow

import (
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

// Agree makes sure that all who use the namespace have the same opinion on how
// many rows its keys share, 0 for a row of its own for each: else they would not
// exclude each other. The first who has keys share rows notes it in the table,
// and makes them. conn is in autocommit.
func (r *Rows) Agree(ctx context.Context, conn driver.Conn, stripes int) error {
	found, err := r.stripes(ctx, conn)
	if err == nil && found < 0 && stripes > 0 {
		if err = r.noteStripes(ctx, conn, stripes); err == nil {
			found, err = r.stripes(ctx, conn)
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("reading how many rows keys share: %w", noBadConn(err))
	case max(found, 0) != stripes:
		return r.disagree(stripes, fmt.Sprintf("others of the namespace have %d", max(found, 0)))
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

// stripes reads how many rows the keys share; negative where nobody has said.
func (r *Rows) stripes(ctx context.Context, conn driver.Conn) (int, error) {
	rows, err := server.Query(ctx, conn, "SELECT token FROM "+r.cfg.Table.String()+
		" WHERE namespace = "+schema.Literal(r.cfg.Namespace)+" AND name = "+schema.Literal(schema.Stripes))
	if err != nil || len(rows) == 0 {
		return -1, err
	}
	return strconv.Atoi(rows[0][0])
}

// noteStripes notes how many rows the keys are to share, where none has a row
// of its own yet.
func (r *Rows) noteStripes(ctx context.Context, conn driver.Conn, stripes int) error {
	namespace := schema.Literal(r.cfg.Namespace)
	rows, err := server.Query(ctx, conn, "SELECT 1 FROM "+r.cfg.Table.String()+
		" WHERE namespace = "+namespace+" AND NOT ("+shared+") AND NOT ("+schema.Floor+") LIMIT 1")
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		return r.disagree(stripes, "the namespace has keys with rows of their own")
	}
	return server.Exec(ctx, conn, fmt.Sprintf("INSERT IGNORE INTO %s (namespace, name, token) VALUES (%s, %s, %d)",
		r.cfg.Table, namespace, schema.Literal(schema.Stripes), stripes))
}

// shared is the condition of the rows that are there because keys share them.
var shared = fmt.Sprintf("LEFT(name, %d) = %s", len(schema.Stripes)-1, schema.Literal(schema.Stripes[:len(schema.Stripes)-1]))

func (r *Rows) disagree(stripes int, why string) error {
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"lockStripes is %[1]d here, and %[2]s, so that locks would not exclude each other; to change it stop all programs that use the namespace and run"+
			" (the first statement keeps tokens growing):\n"+
			"UPDATE %[3]s, (SELECT MAX(token) AS highest FROM %[3]s) d SET token = GREATEST(token, highest) WHERE %[4]s;\n"+
			"DELETE FROM %[3]s WHERE namespace = %[5]s AND NOT (%[4]s)",
		stripes, why, r.cfg.Table, schema.Floor, schema.Literal(r.cfg.Namespace)))
}

// Forget is for keys whose rows have turned out not to be there.
func (r *Rows) Forget(keys []string) { r.known.forget(keys) }

// Leased reports whether key's row is known to have had a lease at some time.
func (r *Rows) Leased(key string) bool { return r.known.leased(key) }

// NoteLeased notes that key's row has a lease, or had one.
func (r *Rows) NoteLeased(key string) { r.known.add(key, true) }

// make makes those rows of keys that are not there, on a connection of its own:
// never in a transaction, and not behind who holds one of the keys.
// Two processes that at once make a row which a clean-up has just removed can
// end in a deadlock; the other's row is there the next time.
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
		if !gone && !server.Deadlock(err) || tries == 3 {
			return fmt.Errorf("making the keys' rows: %w", noBadConn(err))
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

// read returns the tokens of those of keys that have a row, and of the floor.
// It is a plain read, which waits for nobody.
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
	from := "SELECT name, token FROM " + r.cfg.Table.String() + " WHERE "
	return from + "namespace = " + schema.Literal(r.cfg.Namespace) + " AND name IN (" + strings.Join(in, ", ") + ")" +
		" UNION ALL " + from + schema.Floor
}

// insertSQL makes the rows of keys, which begin with the floor's token. The
// floor is locked first: a clean-up that is about to raise it is waited for,
// and none begins before the rows are there.
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

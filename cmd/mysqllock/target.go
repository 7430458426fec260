package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/pflag"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
)

// target is whose locks a command is about, as its flags say.
type target struct {
	dsn, defaultsFile          string
	database, table, namespace string
}

const dsnVariable = "MYSQLLOCK_DSN"

func (t *target) flags(f *pflag.FlagSet) {
	f.StringVar(&t.dsn, "dsn", "", "`DSN` of the server, before "+dsnVariable)
	f.StringVar(&t.defaultsFile, "defaults-file", "", "option `file` to read in place of the usual ones")
	f.StringVar(&t.database, "database", "", "`name` of the database with the lock table")
	f.StringVar(&t.table, "table", "", "the lock table, as `[schema.]table` (default mysqllock)")
	f.StringVar(&t.namespace, "namespace", "", "`namespace` of the keys (default the database's name)")
}

// connectLimit is how long a connection may take to come about where the DSN does
// not say.
const connectLimit = 10 * time.Second

// configs says how to connect, and how locks are kept.
func (t *target) configs() (*mysql.Config, mysqllock.Config, error) {
	cfg, locks, err := t.source()
	if err != nil {
		return nil, locks, err
	}
	if t.database != "" {
		cfg.DBName = t.database
	}
	if t.table != "" {
		locks.Table = t.table
	}
	if t.namespace != "" {
		locks.Namespace = t.namespace
	}
	if cfg.DBName == "" && (locks.Namespace == "" || !strings.Contains(locks.Table, ".")) {
		return nil, locks, errors.New("no database is named, which says where the lock table is, and the namespace of the keys:" +
			" give --database; or --table as schema.table, and --namespace")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = connectLimit
	}
	cfg.Logger = &mysql.NopLogger{} // what matters is in errors
	return cfg, locks, nil
}

func (t *target) source() (*mysql.Config, mysqllock.Config, error) {
	from, dsn := "--dsn", t.dsn
	if dsn == "" && t.defaultsFile == "" {
		from, dsn = dsnVariable, os.Getenv(dsnVariable)
	}
	if dsn == "" {
		return readOptionFiles(t.defaultsFile)
	}
	cfg, locks, err := mysqllock.ParseDSN(dsn)
	if err != nil {
		return nil, locks, fmt.Errorf("%s: %w", from, withoutSecrets(err))
	}
	return cfg, locks, nil
}

// withoutSecrets is what may be said of why a DSN cannot be read: of one that is
// not in the right form any part may be the password, and go-sql-driver quotes it.
func withoutSecrets(err error) error {
	text := err.Error()
	if strings.HasPrefix(text, "invalid value / unknown config name: ") {
		return errors.New("the value of tls= is not known: want true, skip-verify, preferred or false")
	}
	if ours := strings.HasPrefix(text, "mysqllock: ") || strings.HasPrefix(text, "invalid DSN: "); ours && !strings.Contains(text, "@") {
		return err
	}
	return errors.New("it cannot be read: want user:password@tcp(host:port)/database?parameter=value")
}

// open opens a handle with locks, which has connected to nothing. change may be
// nil.
func (t *target) open(change func(*mysqllock.Config)) (*sql.DB, error) {
	cfg, locks, err := t.configs()
	if err != nil {
		return nil, err
	}
	if change != nil {
		change(&locks)
	}
	connector, err := mysqllock.NewConnector(cfg, locks)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

// inspector returns an Inspector, and what closes its handle. several: its connections take several statements in a
// text, as sessions do.
func (t *target) inspector(several bool) (*inspect.Inspector, func(), error) {
	cfg, locks, err := t.configs()
	if err != nil {
		return nil, nil, err
	}
	cfg.MultiStatements = cfg.MultiStatements || several
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, nil, err
	}
	db := sql.OpenDB(connector)
	i, err := inspect.New(db, inspect.Options{Table: locks.Table, Namespace: locks.Namespace, Silent: func(since time.Time, asked string) {
		silent := "for 3s"
		if !since.IsZero() {
			silent = "since " + since.UTC().Format(time.TimeOnly) + " UTC"
		}
		fmt.Fprintf(os.Stderr, "mysqllock: %s has not answered %s (%s)\n", printable(cfg.Addr), silent, asked)
	}})
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return i, func() { db.Close() }, nil
}

// inspecting runs f with an Inspector.
func (t *target) inspecting(ctx context.Context, f func(context.Context, *inspect.Inspector) error) error {
	return t.inspectingBy(ctx, false, f)
}

// inspectingBy is inspecting with an Inspector as inspector returns it.
func (t *target) inspectingBy(ctx context.Context, several bool, f func(context.Context, *inspect.Inspector) error) error {
	i, closeDB, err := t.inspector(several)
	if err != nil {
		return err
	}
	defer closeDB()
	return f(ctx, i)
}

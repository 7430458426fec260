// Package helpers passes lock contexts on to its own functions and methods.
package helpers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

var errPaid = errors.New("paid")

type Order struct {
	ID   int
	Paid bool
}

type Shop struct {
	db   *sql.DB
	gorm *gorm.DB
}

func (s *Shop) conn(ctx context.Context) *gorm.DB { return s.gorm.WithContext(ctx) }

func (s *Shop) find(ctx context.Context, id int) (o Order, err error) {
	if err := s.conn(ctx).First(&o, id).Error; err != nil {
		return o, fmt.Errorf("find: %w", err)
	}
	if o.Paid {
		return o, errPaid
	}
	return o, nil
}

func (s *Shop) save(ctx context.Context, o *Order) error { return s.conn(ctx).Save(o).Error }

func (s *Shop) record(ctx context.Context, id int) error {
	if err := s.conn(ctx).Create(&struct{ ID int }{id}).Error; err != nil {
		return fmt.Errorf("record: %w", err)
	}
	return nil
}

func (s *Shop) pay(ctx context.Context, id int) error {
	ctx = lockctx.With(ctx, "order")
	o, err := s.find(ctx, id)
	if err != nil {
		return err
	}
	if err := s.save(ctx, &o); err != nil {
		return err
	}
	return s.record(ctx, id) // want `record writes after the commit of save on line 58 .*ErrStaleRead.*#stale-read`
}

func (s *Shop) payAtOnce(ctx context.Context, id int) error {
	return s.both(lockctx.With(ctx, "order"), id)
}

func (s *Shop) both(ctx context.Context, id int) error {
	o, err := s.find(ctx, id)
	if err != nil {
		return err
	}
	if err := s.save(ctx, &o); err != nil {
		return err
	}
	return s.conn(ctx).Create(&o).Error // want `Create writes after the commit of save on line 73`
}

func (s *Shop) payAll(ctx context.Context, ids []int) error {
	ctx = lockctx.With(ctx, "orders")
	if _, err := s.find(ctx, 0); err != nil {
		return err
	}
	for _, id := range ids {
		if err := s.record(ctx, id); err != nil { // want `record writes after the commit of record on line 85`
			return err
		}
	}
	return nil
}

func (s *Shop) payEach(ctx context.Context, ids []int) error {
	ctx = lockctx.With(ctx, "orders")
	for _, id := range ids { // each turn reads first
		o, err := s.find(ctx, id)
		if err != nil {
			return err
		}
		if err := s.save(ctx, &o); err != nil {
			return err
		}
	}
	return nil
}

func (s *Shop) inDo(ctx context.Context, id int) error {
	ctx = lockctx.With(ctx, "orders")
	return mysqllock.Do(ctx, s.db, "order", func(ctx context.Context) error { return s.decideInDo(ctx, id) })
}

func (s *Shop) decideInDo(ctx context.Context, id int) error {
	o, err := s.find(ctx, id)
	if err != nil {
		return err
	}
	return errors.Join(s.save(ctx, &o), s.record(ctx, id))
}

func (s *Shop) inTransaction(ctx context.Context, id int) error {
	return s.conn(lockctx.With(ctx, "order")).Transaction(func(tx *gorm.DB) error {
		if err := in(tx, id); err != nil {
			return err
		}
		return s.save(ctx, nil) // without the lock, which is not seen here
	})
}

func in(db *gorm.DB, id int) error {
	var o Order
	db.First(&o, id)
	db.Save(&o)
	return db.Create(&o).Error
}

func (s *Shop) inBegun(ctx context.Context, id int) error {
	ctx = lockctx.With(ctx, "order")
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := s.decideInDo(ctx, id); err != nil { // in the transaction, by its context
		return err
	}
	return tx.Commit()
}

func (s *Shop) throughHandle(ctx context.Context, id int) error {
	return through(s.conn(lockctx.With(ctx, "order")), id)
}

func through(db *gorm.DB, id int) error {
	var o Order
	if err := db.First(&o, id).Error; err != nil {
		return err
	}
	if err := db.Save(&o).Error; err != nil {
		return err
	}
	return db.Create(&o).Error // want `Create writes after the commit of Save on line 157`
}

func (s *Shop) maybe(ctx context.Context, o *Order) error {
	if o.Paid {
		return nil
	}
	return s.save(ctx, o)
}

func (s *Shop) payMaybe(ctx context.Context, id int) error {
	ctx = lockctx.With(ctx, "order")
	o, err := s.find(ctx, id)
	if err != nil {
		return err
	}
	if err := s.maybe(ctx, &o); err != nil { // may write nothing
		return err
	}
	return s.record(ctx, id)
}

func (s *Shop) orElse(ctx context.Context, id int) error {
	ctx = lockctx.With(ctx, "order")
	o, err := s.find(ctx, id)
	if err != nil {
		return err
	}
	if err := s.save(ctx, &o); err == nil {
		return nil
	}
	return s.record(ctx, id) // nothing was written
}

func (s *Shop) again(ctx context.Context, n int) error {
	ctx = lockctx.With(ctx, "order")
	return s.recursive(ctx, n)
}

func (s *Shop) recursive(ctx context.Context, n int) error {
	if _, err := s.find(ctx, n); err != nil {
		return err
	}
	if err := s.record(ctx, n); err != nil {
		return err
	}
	if err := s.recursive(ctx, n-1); err != nil { // may read
		return err
	}
	return s.record(ctx, n)
}

func (s *Shop) parallel(ctx context.Context, ids []int) error {
	return mysqllock.Do(ctx, s.db, "orders", func(ctx context.Context) error {
		g, ctx := errgroup.WithContext(ctx)
		for _, id := range ids {
			g.Go(func() error { return s.record(ctx, id) }) // want `several goroutines begin transactions under Do of line 213, .*#goroutines`
		}
		return g.Wait()
	})
}

func (s *Shop) four(ctx context.Context) error {
	return mysqllock.Do(ctx, s.db, "orders", func(ctx context.Context) error {
		var all sync.WaitGroup
		all.Go(func() { s.record(ctx, 1) })
		all.Go(func() { s.begin(ctx) }) // want `several goroutines begin transactions`
		all.Wait()
		return nil
	})
}

func (s *Shop) begin(ctx context.Context) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	return tx.Commit()
}

func (s *Shop) sideBySide(ctx context.Context) error {
	return mysqllock.Do(ctx, s.db, "orders", func(ctx context.Context) error {
		var all sync.WaitGroup
		all.Go(func() { s.record(ctx, 1) })
		all.Go(func() { s.record(ctx, 2) })
		all.Wait()
		return nil
	}, lockctx.Lease(30*time.Second))
}

func (s *Shop) turns(ctx context.Context) error {
	return mysqllock.Do(ctx, s.db, "orders", func(ctx context.Context) error {
		var all sync.WaitGroup
		for range 4 { // statements take turns
			all.Go(func() { s.db.ExecContext(ctx, "UPDATE orders SET n = 1") })
		}
		all.Wait()
		return nil
	})
}
